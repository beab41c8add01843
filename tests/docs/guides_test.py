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
"""The guides run as they stand, and their notebooks show what they print."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

import jupytext
import nbformat
from absl.testing import absltest, parameterized

GUIDES = pathlib.Path(__file__).resolve().parents[2] / 'docs_nnx/guides'
NAMES = ('optimization_core_workflow', 'optimization_cookbook', 'extra_args')


def code_of(notebook):
  return [cell for cell in notebook.cells if cell.cell_type == 'code']


class TestGuides(parameterized.TestCase):
  def test_names(self):
    """No guide is left out."""
    self.assertCountEqual(NAMES, [path.stem for path in GUIDES.glob('*.md')])

  @parameterized.parameters(*NAMES)
  def test_code_blocks_run_in_order(self, name):
    """As a reader would copy them: into one file, without a notebook."""
    notebook = jupytext.read(GUIDES / f'{name}.md')
    program = '\n\n'.join(cell.source for cell in code_of(notebook))
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / 'program.py'
      path.write_text(program)
      environment = {**os.environ, 'MPLBACKEND': 'Agg'}
      # What a reader has set: neither devices nor strictness of the tests.
      for variable in ('XLA_FLAGS', 'JAX_NUMPY_RANK_PROMOTION'):
        environment.pop(variable, None)
      done = subprocess.run(
        [sys.executable, path.name], cwd=folder, env=environment,
        capture_output=True, text=True,
      )  # fmt: skip
    self.assertEqual(done.returncode, 0, done.stderr[-3000:])
    self.assertNotIn('Warning', done.stderr)

  @parameterized.parameters(*NAMES)
  def test_notebook_has_the_same_cells(self, name):
    text = jupytext.read(GUIDES / f'{name}.md')
    notebook = nbformat.read(GUIDES / f'{name}.ipynb', as_version=4)
    self.assertEqual(
      [(cell.cell_type, cell.source) for cell in notebook.cells],
      [(cell.cell_type, cell.source) for cell in text.cells],
    )

  @parameterized.parameters(*NAMES)
  def test_notebook_has_outputs(self, name):
    notebook = nbformat.read(GUIDES / f'{name}.ipynb', as_version=4)
    nbformat.validate(notebook)
    for cell in code_of(notebook):
      kinds = {output.output_type for output in cell.outputs}
      self.assertNotIn('error', kinds)
      for output in cell.outputs:
        self.assertNotEqual(output.get('name'), 'stderr', cell.source)
      if re.search(r'^print\(', cell.source, re.MULTILINE):
        self.assertIn('stream', kinds, cell.source)
      if re.search(r'^plt\.show|^plot_losses', cell.source, re.MULTILINE):
        self.assertIn('display_data', kinds, cell.source)

  @parameterized.parameters(*NAMES)
  def test_each_section_closes_with_a_check(self, name):
    text = (GUIDES / f'{name}.md').read_text()
    for section in re.split(r'^## ', text, flags=re.MULTILINE)[1:]:
      if '```{code-cell}' in section:
        last = section.split('```{code-cell}')[-1]
        self.assertRegex(last, r'(?m)^ *(assert |np\.testing\.)', section[:40])

  @parameterized.parameters(*NAMES)
  def test_links_between_pages(self, name):
    text = (GUIDES / f'{name}.md').read_text()
    for target in re.findall(r'\]\(([^)]+\.(?:ipynb|rst))\)', text):
      self.assertTrue((GUIDES / target).exists(), target)


if __name__ == '__main__':
  absltest.main()
