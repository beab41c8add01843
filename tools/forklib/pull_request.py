# Copyright 2026 The Flax Authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The patch, written into a working tree of google/flax."""

import difflib
import pathlib

from forklib import download, overlay
from forklib.config import Config, ForkError


def _difference(config: Config, path: pathlib.Path) -> str:
  base = download.unpacked(config, config.base(), 'wheel')
  old = (base / config.rebased_file).read_text().splitlines(keepends=True)
  new = path.read_text().splitlines(keepends=True)
  return ''.join(
    difflib.unified_diff(old, new, 'rebased on', 'in the checkout')
  )


def write(config: Config, checkout: pathlib.Path) -> list[str]:
  """Writes our files and insertions into ``checkout``, ready to commit.

  Args:
    config: declarations of the fork.
    checkout: a git working tree of google/flax, without changes.

  Returns:
    Paths of the files written.

  Raises:
    ForkError: it is no such tree, it has changes, or its optimizer is not the
      one that the patch was made from.
  """
  rebased = checkout / config.rebased_file
  if not (checkout / '.git').exists() or not rebased.exists():
    raise ForkError(
      f'{checkout} is not a git checkout of google/flax. Clone it, and pass '
      'its folder.'
    )
  changes = overlay.git(checkout, 'status', '--porcelain').strip()
  if changes:
    raise ForkError(
      f'{checkout} has changes. Commit or stash them first:\n{changes}'
    )
  if download.sha256(rebased) != config.rebased_sha256:
    raise ForkError(
      f'{config.rebased_file} of the checkout is not the one that the patch '
      'was rebased on. Bring this difference into ours, then declare its '
      f'sha256 in tools/fork.toml:\n{_difference(config, rebased)}'
    )
  return overlay.write_patch(config, checkout, checkout)
