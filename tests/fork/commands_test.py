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
"""The commands of ``tools/fork.py``."""

import pathlib
import subprocess
import tempfile

import workplace
from absl.testing import absltest, parameterized

from forklib import check, download, overlay, upstream_tests
from forklib import config as config_lib

CONFIG = config_lib.load()
BASE = CONFIG.base()


def fork(*args, folder=workplace.ROOT, **env):
  return workplace.run(folder, 'tools/fork.py', *args, **env)


def make_checkout(folder):
  """A git checkout of the base, as google/flax would have it."""
  source = download.unpacked(CONFIG, BASE, 'sdist')
  subprocess.run(
    ['cp', '-r', '--reflink=auto', f'{source}/.', str(folder)], check=True
  )
  (folder / '.complete').unlink()
  git = ('git', '-C', str(folder), '-c', 'user.name=n', '-c', 'user.email=e@x')
  for command in (
    ('init', '-q'), ('add', '-A', '-f'), ('commit', '-q', '-m', 'base')
  ):
    subprocess.run([*git, *command], check=True, capture_output=True)


class TestCommandLine(parameterized.TestCase):
  @parameterized.parameters(
    ('tree', '--out'), ('test-upstream', 'pytest_args'), ('pr', 'checkout'),
    ('check', 'version'), ('link', 'usage'), ('docs', '--execute'),
  )
  def test_help(self, command, mentions):
    code, output = fork(command, '--help')
    self.assertEqual(code, 0)
    self.assertIn(mentions, output)

  def test_unknown_command_error(self):
    code, output = fork('publish')
    self.assertEqual(code, 2)
    self.assertIn("invalid choice: 'publish'", output)


class TestTree(absltest.TestCase):
  def test_is_upstream_with_our_files(self):
    target = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    target = target / 'tree'
    code, output = fork('tree', '--out', str(target))
    self.assertEqual(code, 0, output)
    ours = overlay.our_files(CONFIG, CONFIG.upstream_paths)
    for name in ours:
      self.assertEqual(
        (target / name).read_bytes(), (workplace.ROOT / name).read_bytes()
      )
    source = download.unpacked(CONFIG, BASE, 'sdist')
    edited = {insertion.file for insertion in CONFIG.insertions}
    for name in ('tests/nnx/optimizer_test.py', 'pyproject.toml'):
      self.assertNotIn(name, edited)
      self.assertEqual(
        (target / name).read_bytes(), (source / name).read_bytes()
      )
    code, output = workplace.run(
      target, '-c', 'import flax; from flax import nnx; '
      'print(flax.__file__, nnx.optimizers.__file__)', PYTHONPATH=str(target),
    )
    self.assertEqual(code, 0, output)
    self.assertEqual(output.count(str(target)), 2)


class TestPullRequest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.checkout = pathlib.Path(folder).resolve()

  def test_writes_only_our_files_and_insertions(self):
    make_checkout(self.checkout)
    code, output = fork('pr', str(self.checkout))
    self.assertEqual(code, 0, output)
    overlay.git(self.checkout, 'add', '-A', '-f', '-N')
    changed = overlay.git(self.checkout, 'diff', '--name-only').split()
    wanted = set(overlay.our_files(CONFIG, CONFIG.upstream_paths))
    wanted |= {insertion.file for insertion in CONFIG.insertions}
    self.assertEqual(set(changed), wanted)
    stat = overlay.git(
      self.checkout, 'diff', '--numstat', 'flax/nnx/__init__.py'
    )
    self.assertEqual(stat.split()[:2], ['1', '0'])

    code, output = workplace.run(
      self.checkout / 'tests', '-m', 'pytest', '-q', '-c', '../pyproject.toml',
      '-p', 'no:cacheprovider', '-k', 'not linesearch', 'nnx/optimizer_test.py',
      PYTHONPATH=str(self.checkout),
    )
    self.assertEqual(code, 0, output)

  def test_optimizer_has_moved_on_error(self):
    make_checkout(self.checkout)
    path = self.checkout / CONFIG.rebased_file
    path.write_text(path.read_text() + '\nNEW = 1\n')
    overlay.git(
      self.checkout, '-c', 'user.name=n', '-c', 'user.email=e@x', 'commit',
      '-q', '-a', '-m', 'moved on',
    )
    code, output = fork('pr', str(self.checkout))
    self.assertEqual(code, 1)
    self.assertIn('is not the one that the patch was rebased on', output)
    self.assertIn('+NEW = 1', output)
    self.assertEmpty(overlay.git(self.checkout, 'status', '--porcelain'))

  def test_not_a_clean_checkout_error(self):
    code, output = fork('pr', str(self.checkout))
    self.assertEqual(code, 1)
    self.assertIn('is not a git checkout of google/flax', output)
    make_checkout(self.checkout)
    (self.checkout / 'notes.txt').write_text('mine')
    code, output = fork('pr', str(self.checkout))
    self.assertEqual(code, 1)
    self.assertIn('has changes. Commit or stash them first', output)
    self.assertIn('notes.txt', output)


class TestCheck(absltest.TestCase):
  def test_fits(self):
    for base in CONFIG.bases:
      code, output = fork('check', base.version)
      self.assertEqual(code, 0, output)
      self.assertIn(f'fits flax {base.version}', output)

  def test_does_not_fit(self):
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    name = overlay.our_files(CONFIG, ('flax/nnx/optimizers',))[0]
    for path, text in (
      (CONFIG.rebased_file, 'changed'), ('flax/nnx/__init__.py', ''),
      (name, 'taken'), ('pyproject.toml', ''),
    ):
      (folder / path).parent.mkdir(parents=True, exist_ok=True)
      (folder / path).write_text(text)
    found = check.obstacles(CONFIG, folder)
    self.assertLen(found, 3)
    self.assertRegex(found[0], 'optimizer.py has changed')
    self.assertRegex(found[1], 'matches 0 lines')
    self.assertRegex(found[2], f'{name} exists there too')

  def test_no_such_release_error(self):
    code, output = fork('check', '0.0.0.1')
    self.assertEqual(code, 1)
    self.assertIn('Could not download the sdist of flax 0.0.0.1', output)


class TestUpstreamTests(absltest.TestCase):
  def test_runs_them_against_the_installed_fork(self):
    code, output = fork('test-upstream', 'nnx/ids_test.py')
    self.assertEqual(code, 0, output)
    self.assertRegex(output, r'tests of flax [\d.]+: [1-9]\d* passed')

  def test_failure_error(self):
    code, output = fork('test-upstream', 'nnx/no_such_test.py')
    self.assertEqual(code, 1)

  def test_other_flax_error(self):
    source = download.unpacked(CONFIG, BASE, 'sdist')
    code, output = fork('test-upstream', PYTHONPATH=str(source))
    self.assertEqual(code, 1)
    self.assertIn('need the installed fork', output)

  def test_count(self):
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    report = folder / 'report.xml'
    report.write_text(
      '<testsuites><testsuite tests="9" failures="2" errors="1" skipped="3"/>'
      '</testsuites>'
    )
    self.assertEqual(upstream_tests.count(report), (3, 3, 3))


if __name__ == '__main__':
  absltest.main()
