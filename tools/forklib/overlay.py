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
"""Our files and insertions, laid over a release of Flax."""

import os
import pathlib
import shutil
import subprocess
import sys

from forklib import download
from forklib.config import Base, Config, ForkError

_IGNORED = ('__pycache__', '.DS_Store')


def our_files(config: Config, under: tuple[str, ...]) -> list[str]:
  """Paths of our files under some folders, relative to the checkout."""
  found = []
  for folder in under:
    for path in sorted((config.root / folder).rglob('*')):
      ignored = any(part in _IGNORED for part in path.parts)
      if path.is_file() and not ignored and path.suffix != '.pyc':
        found.append(path.relative_to(config.root).as_posix())
  return found


def base_files(folder: pathlib.Path) -> list[str]:
  """Paths of all files of an unpacked wheel but for its metadata."""
  return sorted(
    path.relative_to(folder).as_posix()
    for path in folder.rglob('*')
    if path.is_file()
    and not path.relative_to(folder).parts[0].endswith('.dist-info')
    and path.name != '.complete'
  )


def insert(config: Config, source: pathlib.Path) -> dict[str, str]:
  """Texts of the upstream files that get lines of ours, by path.

  Only files that ``source`` has are looked at: a wheel has no docs.

  Raises:
    ForkError: an anchor is not found exactly once, or a file is missing.
  """
  texts: dict[str, str] = {}
  is_sdist = (source / 'pyproject.toml').exists()
  for insertion in config.insertions:
    path = source / insertion.file
    if not path.exists():
      if is_sdist or insertion.file.startswith('flax/'):
        raise ForkError(
          f'{insertion.file}: this release of Flax does not have the file. '
          'Adapt the [[insertion]] in tools/fork.toml.'
        )
      continue
    text = texts.get(insertion.file) or path.read_text()
    texts[insertion.file] = insertion.apply(text)
  return texts


def wheel_files(config: Config, base: Base) -> dict[str, pathlib.Path]:
  """What a wheel of the fork has beside our files: target -> source."""
  folder = download.unpacked(config, base, 'wheel')
  ours = set(our_files(config, ('flax',)))
  files = {
    name: folder / name for name in base_files(folder) if name not in ours
  }
  edited = config.root / 'build' / 'edited' / f'flax-{base.version}'
  for name, text in insert(config, folder).items():
    (edited / name).parent.mkdir(parents=True, exist_ok=True)
    (edited / name).write_text(text)
    files[name] = edited / name
  return files


def editable_folder(config: Config, base: Base) -> pathlib.Path:
  """Where the editable tree of the running Python stands."""
  python = f'py{sys.version_info[0]}.{sys.version_info[1]}'
  return config.root / 'build' / 'editable' / f'flax-{base.version}-{python}'


def lay_editable(config: Config, base: Base) -> pathlib.Path:
  """Lays a tree of copied base files and of links to ours.

  A folder that the base does not have is one link, so that new files in it
  show at once. New files elsewhere need this function again.
  """
  target = editable_folder(config, base)
  shutil.rmtree(target, ignore_errors=True)
  files = wheel_files(config, base)
  for name, source in files.items():
    (target / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target / name)
  for name in our_files(config, ('flax',)):
    path = pathlib.PurePosixPath(name)
    for folder in reversed(path.parents[:-1]):  # from ``flax`` downwards
      if not (target / folder).exists():
        os.symlink(config.root / folder, target / folder)
    if not (target / name).exists():
      os.symlink(config.root / name, target / name)
  return target


def lay_tree(config: Config, base: Base, target: pathlib.Path) -> None:
  """Writes the whole fork as one source tree: sdist, our files, insertions."""
  source = download.unpacked(config, base, 'sdist')
  shutil.rmtree(target, ignore_errors=True)
  shutil.copytree(source, target, ignore=shutil.ignore_patterns('.complete'))
  write_patch(config, source, target)


def write_patch(
  config: Config, source: pathlib.Path, target: pathlib.Path
) -> list[str]:
  """Writes what belongs into google/flax over ``target``.

  Args:
    config: declarations of the fork.
    source: tree whose files get the insertions.
    target: tree to write into.

  Returns:
    Paths of the files written.
  """
  edited = insert(config, source)  # before anything is written
  written = []
  for name in our_files(config, config.upstream_paths):
    (target / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(config.root / name, target / name)
    written.append(name)
  for name, text in edited.items():
    (target / name).write_text(text)
    written.append(name)
  return written


def git(folder: pathlib.Path, *args: str) -> str:
  """Output of a git command in ``folder``.

  Raises:
    ForkError: git failed.
  """
  done = subprocess.run(
    ['git', '-C', str(folder), *args], capture_output=True, text=True
  )
  if done.returncode:
    raise ForkError(f'git {" ".join(args)}: {done.stderr.strip()}')
  return done.stdout
