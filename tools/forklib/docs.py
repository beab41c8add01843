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
"""The guides are executed, and the documentation is built."""

import pathlib
import re
import subprocess
import sys

from forklib import overlay
from forklib.config import Base, Config, ForkError

# The guides are kept as notebook and as text, as upstream's are.
_EXPECTED = re.compile(
  "multiple files found for the document|^Use '.*' for the build"
)


def guides(config: Config) -> list[pathlib.Path]:
  """The texts of our guides."""
  return sorted((config.root / 'docs_nnx/guides').glob('*.md'))


def execute(text: pathlib.Path) -> pathlib.Path:
  """Runs a guide and writes it, with its outputs, as a notebook.

  Args:
    text: the guide as MyST text; the notebook will be its neighbour.

  Raises:
    ForkError: a cell failed, or printed a warning.
  """
  import jupytext
  import nbclient
  import nbformat

  notebook = jupytext.read(text)
  client = nbclient.NotebookClient(
    notebook, timeout=900, kernel_name='python3', record_timing=False,
    coalesce_streams=True,
    resources={'metadata': {'path': str(text.parent)}},
  )  # fmt: skip
  try:
    client.execute()
  except nbclient.exceptions.CellExecutionError as error:
    raise ForkError(f'{text.name}: a cell failed.\n{error}') from error
  for number, cell in enumerate(notebook.cells):
    cell.id = f'cell-{number}'  # else random
    for output in cell.get('outputs', ()):
      if output.get('name') == 'stderr':
        raise ForkError(f'{text.name}: a cell warns.\n{output.text}')
  notebook.metadata.pop('language_info', None)
  path = text.with_suffix('.ipynb')
  nbformat.write(notebook, path)
  return path


def warnings_of_ours(config: Config, report: str) -> list[str]:
  """Lines of Sphinx's report that are about our pages and docstrings."""
  ours = [
    name.removesuffix(suffix)
    for name in overlay.our_files(config, ('docs_nnx', 'flax'))
    for suffix in ('.ipynb', '.md', '.rst', '.py')
    if name.endswith(suffix)
  ]
  modules = [name.replace('/', '.') for name in ours if name[:5] == 'flax/']
  marks = (
    *ours, *modules, 'flax.nnx.optimizers.', 'flax.nnx.Optimizer',
    'flax.nnx.ModelAndOptimizer',
  )  # fmt: skip
  return [
    line
    for line in report.splitlines()
    if any(mark in line for mark in marks) and not _EXPECTED.search(line)
  ]


def build(config: Config, base: Base, target: pathlib.Path) -> pathlib.Path:
  """Builds the documentation of the fork with upstream's settings.

  Args:
    config: declarations of the fork.
    base: the base release.
    target: folder of the HTML files.

  Returns:
    The first page.

  Raises:
    ForkError: Sphinx failed, or warns of one of our pages.
  """
  tree = config.root / 'build/docs-tree' / f'flax-{base.version}'
  overlay.lay_tree(config, base, tree)
  report = target.parent / 'warnings.txt'
  target.mkdir(parents=True, exist_ok=True)
  result = subprocess.run(
    [
      sys.executable, '-m', 'sphinx', '-b', 'html', '-q', '-E', '--keep-going',
      '-w', str(report), str(tree / 'docs_nnx'), str(target),
    ],
    stderr=subprocess.PIPE, text=True,
  )  # fmt: skip
  if result.returncode:
    raise ForkError(f'Sphinx failed.\n{result.stderr[-3000:]}')
  found = warnings_of_ours(config, report.read_text())
  if found:
    raise ForkError('Sphinx warns of our pages:\n' + '\n'.join(found))
  return target / 'index.html'
