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
"""The wheel and the editable tree: the base release, and what is ours."""

import email
import pathlib
import shutil
import tempfile
import zipfile

import workplace
from absl.testing import absltest, parameterized
from packaging.requirements import Requirement

from forklib import config as config_lib
from forklib import download, overlay

BUILD = ('-m', 'pip', 'wheel', '-q', '--no-deps', '--no-build-isolation')


def contents(wheel):
  """Files of a wheel without its metadata, and its parsed METADATA."""
  with zipfile.ZipFile(wheel) as file:
    files = {name: file.read(name) for name in file.namelist()}
  metadata = next(files[n] for n in files if n.endswith('METADATA'))
  files = {n: data for n, data in files.items() if '.dist-info/' not in n}
  return files, email.message_from_bytes(metadata)


def requirements(metadata):
  """Those that hold for the running Python and no extra."""
  found = map(Requirement, metadata.get_all('Requires-Dist'))
  return {
    (r.name.lower().replace('_', '-'), str(r.specifier))
    for r in found
    if r.marker is None or r.marker.evaluate({'extra': ''})
  }


class TestWheel(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.config = config_lib.load()
    cls.base = cls.config.base()
    cls.folder = tempfile.TemporaryDirectory()
    cls.addClassCleanup(cls.folder.cleanup)
    code, output = workplace.run(
      workplace.ROOT, *BUILD, '-w', cls.folder.name, '.'
    )
    assert code == 0, output
    (wheel,) = pathlib.Path(cls.folder.name).glob('*.whl')
    cls.name = wheel.name
    cls.files, cls.metadata = contents(wheel)
    cls.base_files, cls.base_metadata = contents(
      download.archive(cls.config, cls.base, 'wheel')
    )

  def test_holds_the_base_byte_for_byte(self):
    edited = {insertion.file for insertion in self.config.insertions}
    ours = set(overlay.our_files(self.config, ('flax',)))
    self.assertGreater(len(self.base_files), 100)
    self.assertContainsSubset(set(self.base_files), set(self.files))
    for name, data in self.base_files.items():
      if name not in ours | edited:
        self.assertEqual(self.files[name], data, name)
    self.assertEqual(set(self.files), set(self.base_files) | ours)

  def test_holds_our_files(self):
    for name in overlay.our_files(self.config, ('flax',)):
      data = (workplace.ROOT / name).read_bytes()
      self.assertEqual(self.files[name], data, name)

  def test_inserts_whole_lines(self):
    for insertion in self.config.insertions:
      if insertion.file not in self.files:
        continue
      old = self.base_files[insertion.file].decode().splitlines()
      new = self.files[insertion.file].decode().splitlines()
      for line in insertion.lines:
        self.assertEqual(new.count(line), 1)
        new.remove(line)
      self.assertEqual(new, old)

  def test_metadata(self):
    version = f'{self.base.version}+extraargs.{self.config.patch}'
    self.assertEqual(self.metadata['Name'], 'flax')
    self.assertEqual(self.metadata['Version'], version)
    self.assertTrue(self.name.startswith(f'flax-{version}-'))
    self.assertEqual(
      requirements(self.metadata), requirements(self.base_metadata)
    )
    self.assertEqual(
      set(self.metadata.get_all('Provides-Extra')),
      {'testing', 'docs', 'examples', 'benchmarks'},
    )


class TestEditable(absltest.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.root = workplace.copy_checkout(pathlib.Path(folder).resolve())
    self.config = config_lib.load(self.root)
    self.base = self.config.base()

  def evaluate(self, code):
    tree = overlay.editable_folder(self.config, self.base)
    status, output = workplace.run(
      self.root, '-c', f'{code}', PYTHONPATH=str(tree)
    )
    self.assertEqual(status, 0, output)
    return output.strip()

  def test_edits_and_new_files_show(self):
    overlay.lay_editable(self.config, self.base)
    where = self.evaluate('import flax; print(flax.__file__)')
    self.assertTrue(where.startswith(str(self.root / 'build/editable')))

    edited = self.root / 'flax/nnx/training/optimizer.py'
    edited.write_text(edited.read_text() + "\nMARK = 'edited'\n")
    code = 'from flax.nnx.training import optimizer; print(optimizer.MARK)'
    self.assertEqual(self.evaluate(code), 'edited')

    (self.root / 'flax/nnx/optimizers/fresh.py').write_text('MARK = 1\n')
    code = 'from flax.nnx.optimizers import fresh; print(fresh.MARK)'
    self.assertEqual(self.evaluate(code), '1')

    (self.root / 'flax/nnx/training/fresh.py').write_text('MARK = 2\n')
    status, output = workplace.run(self.root, 'tools/fork.py', 'link')
    self.assertEqual(status, 0, output)
    code = 'from flax.nnx.training import fresh; print(fresh.MARK)'
    self.assertEqual(self.evaluate(code), '2')

  def test_pythons_do_not_share_a_tree(self):
    folders = set()
    for version in ((3, 11), (3, 12), (3, 13)):
      with absltest.mock.patch.object(
        overlay.sys, 'version_info', version
      ):
        base = self.config.base(version)
        folders.add(overlay.editable_folder(self.config, base))
    self.assertLen(folders, 3)

  def test_pip_points_at_the_tree(self):
    code, output = workplace.run(
      self.root, '-m', 'pip', 'install', '-q', '--no-deps',
      '--no-build-isolation', '--target', 'site', '-e', '.',
    )
    self.assertEqual(code, 0, output)
    (pth,) = (self.root / 'site').glob('*.pth')
    tree = overlay.editable_folder(self.config, self.base)
    self.assertEqual(pth.read_text().strip(), str(tree))
    self.assertTrue((tree / 'flax/nnx/optimizers').is_symlink())


class TestErrors(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.root = workplace.copy_checkout(pathlib.Path(folder).resolve())

  def build(self, **env):
    code, output = workplace.run(self.root, *BUILD, '.', **env)
    self.assertNotEqual(code, 0)
    self.assertEmpty(list(self.root.glob('*.whl')))
    return output

  def edit(self, old, new):
    path = self.root / 'tools/fork.toml'
    text = path.read_text()
    self.assertIn(old, text)
    path.write_text(text.replace(old, new))

  def test_wrong_hash_error(self):
    base = config_lib.load().base()
    self.edit(base.wheel_sha256, '0' * 64)
    output = self.build()
    self.assertIn(f'flax {base.version} has sha256 {base.wheel_sha256}', output)
    self.assertIn('find out whether the index or tools/fork.toml', output)

  def test_damaged_download_is_replaced(self):
    config = config_lib.load(self.root)
    path = download.archive(config, config.base(), 'wheel')
    path.write_bytes(b'damaged')
    path = download.archive(config, config.base(), 'wheel')
    self.assertEqual(download.sha256(path), config.base().wheel_sha256)

  def test_unreachable_index_error(self):
    shutil.rmtree(self.root / 'build')
    output = self.build(
      PIP_NO_INDEX='1', PIP_FIND_LINKS='', PIP_CONFIG_FILE='/dev/null'
    )
    self.assertIn('Could not download the wheel of flax', output)
    self.assertIn('Check the network and the configuration of pip', output)

  @parameterized.parameters(
    (r"anchor = 'from \. import compat as compat'", 0),
    (r"anchor = 'from \. import compat as compat'", 2),
  )
  def test_anchor_error(self, old, count):
    new = {0: "anchor = 'nowhere'", 2: r"anchor = 'from \. import graph.*'"}
    self.edit(old, new[count])
    output = self.build()
    self.assertIn('flax/nnx/__init__.py: the anchor', output)
    self.assertIn(f'matches {count} lines, it must match one', output)
    self.assertIn('Adapt the [[insertion]]', output)


class TestInsertion(absltest.TestCase):
  def test_indented_like_the_anchor(self):
    insertion = config_lib.Insertion('index.rst', 'guides', ('ours', 'too'))
    text = 'toctree::\n   first\n   guides\n   last\n'
    self.assertEqual(
      insertion.apply(text),
      'toctree::\n   first\n   guides\n   ours\n   too\n   last\n',
    )

  def test_base_of_a_python(self):
    config = config_lib.load()
    self.assertEqual(config.base((3, 11)).version, '0.12.8')
    self.assertEqual(config.base((3, 13)).version, '0.12.12')
    with self.assertRaisesRegex(config_lib.ForkError, 'Python 3.10'):
      config.base((3, 10))


if __name__ == '__main__':
  absltest.main()
