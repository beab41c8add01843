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
"""The API pages name everything public, and every docstring shows its use."""

import inspect
import pathlib

from absl.testing import absltest, parameterized

from flax import nnx
from flax.nnx.training import optimizer as optimizer_lib

PAGES = (
  pathlib.Path(__file__).resolve().parents[2]
  / 'docs_nnx/api_reference/flax.nnx'
)
STATE = ('OptState', 'OptArray', 'OptVariable', 'to_opt_state')
METHODS = ('update', 'extra_args', 'value_and_grad', 'value_and_update')


def public(module):
  return [
    name
    for name, member in vars(module).items()
    if not name.startswith('_') and not inspect.ismodule(member)
  ]


class TestPages(parameterized.TestCase):
  def test_optimizers(self):
    page = (PAGES / 'optimizers.rst').read_text()
    names = public(nnx.optimizers)
    self.assertIn('minimize', names)
    for name in names:
      self.assertRegex(page, rf'(?m)^\.\. auto(class|function):: {name}$')

  def test_optimizer(self):
    page = (PAGES / 'training/optimizer.rst').read_text()
    for name in ('Optimizer', 'ModelAndOptimizer', *STATE):
      self.assertRegex(page, rf'(?m)^\.\. auto(class|function):: {name}$')
    for name in METHODS:
      self.assertRegex(page, rf':members:.*\b{name}\b')

  def test_every_docstring_has_a_doctest(self):
    members = [getattr(nnx.optimizers, name) for name in public(nnx.optimizers)]
    members += [getattr(optimizer_lib, name) for name in STATE]
    members += [nnx.Optimizer, nnx.ModelAndOptimizer]
    members += [getattr(nnx.Optimizer, name) for name in METHODS]
    members += [nnx.optimizers.LBFGS.update]
    for member in members:
      self.assertIn('>>> ', member.__doc__, member)


if __name__ == '__main__':
  absltest.main()
