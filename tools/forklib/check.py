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
"""Whether the patch fits another release of Flax."""

import pathlib
import tempfile

from forklib import download, overlay
from forklib.config import Config, ForkError


def obstacles(config: Config, source: pathlib.Path) -> list[str]:
  """Why the patch does not fit the source tree of a release, if so.

  Args:
    config: declarations of the fork.
    source: an unpacked sdist.

  Returns:
    One sentence for each obstacle.
  """
  found = []
  rebased = source / config.rebased_file
  if not rebased.exists():
    found.append(f'{config.rebased_file} is gone.')
  elif download.sha256(rebased) != config.rebased_sha256:
    found.append(f'{config.rebased_file} has changed; rebase ours on it.')
  try:
    overlay.insert(config, source)
  except ForkError as error:
    found.append(str(error))
  expected = {config.rebased_file, *config.replaced_files}
  for name in overlay.our_files(config, config.upstream_paths):
    if name not in expected and (source / name).exists():
      found.append(f'{name} exists there too; rename ours or merge them.')
  return found


def check(config: Config, version: str) -> list[str]:
  """Downloads a release and tells its ``obstacles``."""
  with tempfile.TemporaryDirectory() as temporary:
    folder = pathlib.Path(temporary)
    path = download.fetch(version, 'sdist', folder / 'download')
    download.unpack(path, folder / 'source')
    return obstacles(config, folder / 'source')
