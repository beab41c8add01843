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
"""Releases of Flax from the package index, checked and unpacked."""

import hashlib
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

from forklib.config import Base, Config, ForkError


def sha256(path: pathlib.Path) -> str:
  """Hash of a file, in hexadecimal."""
  return hashlib.sha256(path.read_bytes()).hexdigest()


def fetch(version: str, kind: str, folder: pathlib.Path) -> pathlib.Path:
  """Downloads a release with pip, as it is configured here.

  Args:
    version: of Flax.
    kind: 'wheel' or 'sdist'.
    folder: where to put it.

  Returns:
    Path of the file.

  Raises:
    ForkError: pip could not get it.
  """
  only = '--only-binary' if kind == 'wheel' else '--no-binary'
  folder.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=folder) as temporary:
    command = [
      sys.executable, '-m', 'pip', 'download', '--no-deps', f'{only}=flax',
      '--ignore-requires-python', '--dest', temporary, f'flax=={version}',
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    files = list(pathlib.Path(temporary).iterdir())
    if done.returncode or not files:
      raise ForkError(
        f'Could not download the {kind} of flax {version} from the package '
        'index. Check the network and the configuration of pip (pip config '
        f'list), then run this again. pip said:\n{done.stderr.strip()[-2000:]}'
      )
    return pathlib.Path(shutil.move(files[0], folder / files[0].name))


def archive(config: Config, base: Base, kind: str) -> pathlib.Path:
  """The wheel or sdist of a base, downloaded once, its hash checked always.

  Raises:
    ForkError: it cannot be had, or is not the declared one.
  """
  declared = base.wheel_sha256 if kind == 'wheel' else base.sdist_sha256
  folder = config.root / 'build' / 'downloads'
  pattern = '*.whl' if kind == 'wheel' else '*.tar.gz'
  for path in folder.glob(f'flax-{base.version}{pattern}'):
    if sha256(path) == declared:
      return path
    path.unlink()
  path = fetch(base.version, kind, folder)
  found = sha256(path)
  if found != declared:
    path.unlink()
    raise ForkError(
      f'The {kind} of flax {base.version} has sha256 {found}, declared is '
      f'{declared}. Do not build from it: find out whether the index or '
      'tools/fork.toml is wrong.'
    )
  return path


def unpacked(config: Config, base: Base, kind: str) -> pathlib.Path:
  """Folder with the contents of the wheel or sdist of a base.

  The sdist stands at ``build/upstream/flax-VERSION``.
  """
  path = archive(config, base, kind)
  name = 'upstream' if kind == 'sdist' else 'wheel'
  folder = config.root / 'build' / name / f'flax-{base.version}'
  done = folder / '.complete'
  if done.exists():
    return folder
  # Several processes may get here at once; the first to finish wins.
  folder.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
    fresh = pathlib.Path(temporary) / 'fresh'
    unpack(path, fresh)
    (fresh / '.complete').write_text(sha256(path))
    if folder.exists() and not done.exists():
      shutil.rmtree(folder, ignore_errors=True)
    try:
      fresh.rename(folder)
    except OSError:
      if not done.exists():
        raise
  return folder


def unpack(path: pathlib.Path, folder: pathlib.Path) -> None:
  """Unpacks a wheel, or an sdist without its top folder, into ``folder``."""
  folder.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
    if path.suffix == '.whl':
      with zipfile.ZipFile(path) as file:
        file.extractall(temporary)
      source = pathlib.Path(temporary)
    else:
      with tarfile.open(path) as file:
        file.extractall(temporary, filter='data')
      (source,) = pathlib.Path(temporary).iterdir()
    shutil.copytree(source, folder)
