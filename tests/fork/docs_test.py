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
"""Which of Sphinx's warnings are about our pages."""

import tempfile
from unittest import mock

import workplace
from absl.testing import absltest

from forklib import config as config_lib
from forklib import docs
from forklib.config import ForkError

CONFIG = config_lib.load()

OURS = (
  '/tree/docs_nnx/guides/extra_args.ipynb:10: WARNING: undefined label: x',
  '/tree/docs_nnx/api_reference/flax.nnx/optimizers.rst: WARNING: no toctree',
  '/tree/flax/nnx/training/optimizer.py:docstring of flax.nnx.training.'
  'optimizer.to_opt_state:3: ERROR: Unexpected indentation.',
  '<unknown>: docstring of flax.nnx.optimizers.minimize:4: WARNING: Bullet',
)
THEIRS = (
  '/tree/docs_nnx/guides/surgery.ipynb:10: WARNING: undefined label: x',
  '/tree/flax/nnx/nn/linear.py:docstring of flax.nnx.Linear:3: ERROR: text',
  'WARNING: multiple files found for the document "guides/extra_args": '
  'guides/extra_args.md, guides/extra_args.ipynb',
  "Use '/tree/docs_nnx/guides/extra_args.ipynb' for the build.",
)


class TestWarnings(absltest.TestCase):
  def test_ours(self):
    report = '\n'.join((*OURS, *THEIRS))
    self.assertEqual(docs.warnings_of_ours(CONFIG, report), list(OURS))

  def build(self, returncode, report):
    """Runs ``build`` with another Sphinx."""

    def sphinx(command, **kwargs):
      with open(command[command.index('-w') + 1], 'w') as file:
        file.write(report)
      return mock.Mock(returncode=returncode, stderr='it broke')

    target = self.enter_context(tempfile.TemporaryDirectory())
    target = workplace.pathlib.Path(target) / 'html'
    with (
      mock.patch.object(docs.overlay, 'lay_tree'),
      mock.patch.object(docs.subprocess, 'run', sphinx),
    ):
      return docs.build(CONFIG, CONFIG.base(), target)

  def test_build(self):
    page = self.build(0, '\n'.join(THEIRS))
    self.assertEqual(page.name, 'index.html')

  def test_build_error(self):
    with self.assertRaisesRegex(ForkError, 'warns of our pages:\n.*extra_args'):
      self.build(0, '\n'.join((*THEIRS, *OURS)))
    with self.assertRaisesRegex(ForkError, 'Sphinx failed.\nit broke'):
      self.build(1, '')


if __name__ == '__main__':
  absltest.main()
