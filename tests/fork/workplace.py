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
"""A copy of the checkout for tests that change files in it."""

import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / 'tools'))


def copy_checkout(target, *, downloads=True):
  """Copies the files that make up the fork, and what was downloaded."""
  names = ('flax', 'tools', 'tests', 'examples', 'pyproject.toml',
           'README.md', 'LICENSE')
  skip = shutil.ignore_patterns('__pycache__')
  for name in names:
    source = ROOT / name
    if source.is_dir():
      shutil.copytree(source, target / name, ignore=skip)
    else:
      shutil.copy(source, target / name)
  if downloads and (ROOT / 'build/downloads').exists():
    shutil.copytree(ROOT / 'build/downloads', target / 'build/downloads')
  return pathlib.Path(target)


def run(folder, *args, **env):
  """Runs Python in ``folder``; returns exit code and output."""
  done = subprocess.run(
    [sys.executable, *args], cwd=folder, capture_output=True, text=True,
    env={**os.environ, **env},
  )
  return done.returncode, done.stdout + done.stderr
