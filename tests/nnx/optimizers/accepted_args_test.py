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
"""Which extra arguments reach ``tx.update``."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized

from flax import nnx
from flax.nnx.training import extra_args


class TestWhatReachesUpdate(parameterized.TestCase):
  def run_update(self, update_fn, **kwargs):
    """Calls ``update`` on a transformation with the given update function."""
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    tx = optax.GradientTransformation(lambda params: (), update_fn)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    grads = nnx.grad(lambda m: m(jnp.ones(2)).sum())(model)
    optimizer.update(model, grads, **kwargs)
    return nnx.as_pure(nnx.state(grads))

  def test_none_for_a_plain_transformation(self):
    def update_fn(updates, state, params=None):
      return updates, state

    self.run_update(update_fn, value=1.0, value_fn=lambda model: 0.0, typo=3)

  def test_named_only(self):
    seen = {}

    def update_fn(updates, state, params=None, *, value, scale=1.0):
      seen.update(value=value, scale=scale)
      return updates, state

    self.run_update(update_fn, value=2.0, value_fn=lambda model: 0.0, other=3)
    self.assertEqual(seen, {'value': 2.0, 'scale': 1.0})

  def test_var_keyword_gets_all(self):
    seen = {}

    def update_fn(updates, state, params=None, **extra_args):
      seen.update(extra_args)
      return updates, state

    self.run_update(update_fn, value=2.0, scale=3, flag='yes', nothing=None)
    self.assertEqual(
      seen, {'value': 2.0, 'scale': 3, 'flag': 'yes', 'nothing': None}
    )

  def test_grad_is_supplied_when_named(self):
    seen = {}

    def update_fn(updates, state, params=None, *, grad):
      seen['grad'] = grad
      return updates, state

    grads = self.run_update(update_fn)
    jax.tree.map(np.testing.assert_array_equal, seen['grad'], grads)

  def test_gradient_parameter_called_grad(self):
    seen = {}

    def update_fn(grad, state, params=None, **extra_args):
      seen.update(extra_args)
      return grad, state

    self.run_update(update_fn, value=1.0, value_fn=lambda model: 0.0)
    self.assertEqual(set(seen), {'value', 'value_fn'})

  def test_grad_is_supplied_with_value_fn_only(self):
    seen = []

    def update_fn(updates, state, params=None, **extra_args):
      seen.append(extra_args.get('grad'))
      return updates, state

    self.run_update(update_fn, value=1.0)
    grads = self.run_update(update_fn, value_fn=lambda model: 0.0)
    self.assertIsNone(seen[0])
    jax.tree.map(np.testing.assert_array_equal, seen[1], grads)

  @parameterized.parameters('state', 'pure', 'dict', 'wider')
  def test_grad_of_the_caller_wins(self, form):
    seen = {}

    def update_fn(updates, state, params=None, *, grad=None, **extra_args):
      seen['grad'] = grad
      return updates, state

    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    threes = jax.tree.map(lambda x: 3 * jnp.ones_like(x), nnx.state(model))
    grad = {
      'state': threes,
      'pure': nnx.as_pure(threes),
      'dict': nnx.to_pure_dict(threes),
      'wider': nnx.State({**threes, 'scale': nnx.BatchStat(jnp.ones(2))}),
    }[form]

    grads = self.run_update(update_fn, value_fn=lambda m: 0.0, grad=grad)
    self.assertEqual(
      jax.tree.structure(seen['grad']), jax.tree.structure(grads)
    )
    for leaf in jax.tree.leaves(seen['grad']):
      np.testing.assert_array_equal(leaf, 3 * np.ones_like(leaf))

  def test_variables_become_arrays(self):
    seen = {}

    def update_fn(updates, state, params=None, **extra_args):
      seen.update(extra_args)
      return updates, state

    self.run_update(update_fn, scale=nnx.Param(jnp.array(2.0)))
    self.assertIsInstance(seen['scale'], jax.Array)

  def test_accepted_names_of_a_callable_without_signature(self):
    class Opaque:
      __signature__ = 'none'

      def __call__(self, *args):
        return args

    plain = optax.GradientTransformation(lambda p: (), Opaque())
    extra = optax.GradientTransformationExtraArgs(lambda p: (), Opaque())
    self.assertEqual(extra_args.accepted_names(plain), frozenset())
    self.assertIsNone(extra_args.accepted_names(extra))


if __name__ == '__main__':
  absltest.main()
