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
"""Upstream's own tests, unmodified, against the installed fork."""

import os
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree

from forklib import download
from forklib.config import Base, Config, ForkError

# As upstream runs them.
ENVIRONMENT = {
  'XLA_FLAGS': '--xla_force_host_platform_device_count=4',
  'JAX_NUMPY_RANK_PROMOTION': 'raise',
  'FLAX_PROFILE': '1',
}

_WHICH_FLAX = (
  'import flax, importlib.metadata as m; '
  'print(m.version("flax")); print(flax.__file__)'
)


def check_installed(config: Config, folder: pathlib.Path) -> None:
  """Checks that Python, run in ``folder``, imports the installed fork.

  Raises:
    ForkError: it imports something else.
  """
  done = subprocess.run(
    [sys.executable, '-c', _WHICH_FLAX], cwd=folder, capture_output=True,
    text=True,
  )
  version, _, file = done.stdout.strip().partition('\n')
  wanted = config.version()
  inside = pathlib.Path(file).is_relative_to(config.root / 'build/upstream')
  if done.returncode or version != wanted or inside:
    raise ForkError(
      f'The tests need the installed fork, flax {wanted}, but Python '
      f'{sys.executable} finds {version or "none"} at {file or "no path"}. '
      'Install the fork first: python -m pip install ".[testing]".'
      f'\n{done.stderr[-1000:]}'
    )


def count(report: pathlib.Path) -> tuple[int, int, int]:
  """Numbers of tests that passed, failed and were skipped, of a JUnit file."""
  passed = failed = skipped = 0
  for suite in ElementTree.parse(report).getroot().iter('testsuite'):
    bad = int(suite.get('failures', 0)) + int(suite.get('errors', 0))
    omitted = int(suite.get('skipped', 0))
    passed += int(suite.get('tests', 0)) - bad - omitted
    failed += bad
    skipped += omitted
  return passed, failed, skipped


def run(config: Config, base: Base, args: list[str]) -> None:
  """Runs ``tests/nnx`` of the sdist of ``base`` in parallel.

  Args:
    config: declarations of the fork.
    base: the release whose tests to run.
    args: for pytest. Without any, all tests run, and as many have to pass as
      without the patch.

  Raises:
    ForkError: a test failed, or too few passed.
  """
  tests = download.unpacked(config, base, 'sdist') / 'tests'
  check_installed(config, tests)
  with tempfile.TemporaryDirectory() as temporary:
    report = pathlib.Path(temporary) / 'report.xml'
    command = [
      sys.executable, '-m', 'pytest', '-q', '-n', 'auto',
      '-c', '../pyproject.toml', '-p', 'no:cacheprovider',
      f'--junitxml={report}', *(args or ['nnx']),
    ]
    # In ``tests``, so that the ``flax`` of the sdist is not on the path.
    done = subprocess.run(command, cwd=tests, env={**os.environ, **ENVIRONMENT})
    if not report.exists():
      raise ForkError(f'pytest did not run (exit code {done.returncode}).')
    passed, failed, skipped = count(report)
  needed = 1 if args else base.baseline
  print(
    f"upstream's tests of flax {base.version}: {passed} passed, {failed} "
    f'failed, {skipped} skipped; {needed} have to pass'
  )
  if failed or done.returncode or passed < needed:
    raise ForkError(
      f"Upstream's tests: {failed} failed, {passed} passed of at least "
      f'{needed}. Run one by its name to see why: python tools/fork.py '
      'test-upstream nnx/optimizer_test.py.'
    )
