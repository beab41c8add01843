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
"""Parameters and losses of several dtypes: steps work, or change nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_optax
from absl.testing import absltest, parameterized

from flax import nnx

MAKE = {
  'adam': lambda model: nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param),
  'optax_lbfgs': lambda model: nnx.Optimizer(
    model, optax.lbfgs(), wrt=nnx.Param
  ),
  'polyak': lambda model: nnx.Optimizer(
    model, optax.polyak_sgd(), wrt=nnx.Param
  ),
  'backtracking': lambda model: nnx.optimizers.BacktrackingLinesearch(
    model, wrt=nnx.Param, store_grad=True
  ),
  'zoom': lambda model: nnx.optimizers.ZoomLinesearch(model, wrt=nnx.Param),
  'lbfgs': lambda model: nnx.optimizers.LBFGS(model, wrt=nnx.Param),
}


class MLP(nnx.Module):
  def __init__(self, dtypes, rngs):
    first, second = dtypes
    self.first = nnx.Linear(3, 4, param_dtype=first, rngs=rngs)
    self.second = nnx.Linear(4, 2, param_dtype=second, rngs=rngs)

  def __call__(self, x):
    return self.second(jnp.tanh(self.first(x)))


def read(*nodes):
  return jax.tree.map(np.array, nnx.as_pure(nnx.state(nodes)))


class TestPrecision(parameterized.TestCase):
  def check(self, name, dtypes, loss_dtype, from_state=False):
    x, y = plain_optax.data()
    model = MLP(dtypes, nnx.Rngs(0))
    optimizer = MAKE[name](model)
    kinds = jax.tree.map(jnp.result_type, read(model, optimizer))
    n = 0

    def loss_fn(model):
      return jnp.mean((model(x) - y) ** 2).astype(loss_dtype)

    @nnx.jit
    def step(model, optimizer):
      nonlocal n
      n += 1
      return optimizer.value_and_update(loss_fn, from_state=from_state)(model)

    losses = [step(model, optimizer) for _ in range(4)]
    self.assertEqual(n, 1)
    self.assertLess(losses[-1], losses[0])
    self.assertEqual(losses[0].dtype, loss_dtype)
    self.assertEqual(
      jax.tree.map(jnp.result_type, read(model, optimizer)), kinds
    )

  @parameterized.product(
    name=tuple(MAKE),
    dtypes=(('bfloat16', 'bfloat16'), ('bfloat16', 'float32')),
    loss_dtype=('float32', 'bfloat16'),
  )
  def test_low_precision(self, name, dtypes, loss_dtype):
    self.check(name, dtypes, loss_dtype)

  @parameterized.product(
    name=tuple(MAKE),
    dtypes=(('float64', 'float64'), ('float32', 'float64')),
    loss_dtype=('float64', 'float32'),
  )
  def test_x64(self, name, dtypes, loss_dtype):
    with jax.enable_x64(True):
      self.check(name, dtypes, loss_dtype)

  @parameterized.product(
    name=('backtracking', 'zoom', 'lbfgs'),
    dtypes=(('bfloat16', 'bfloat16'), ('float32', 'bfloat16')),
  )
  def test_from_state(self, name, dtypes):
    self.check(name, dtypes, 'float32', from_state=True)

  @parameterized.parameters(
    (('bfloat16', 'bfloat16'), 'float32', False),
    (('float32', 'float32'), 'float64', True),
  )
  def test_from_state_rounds_error(self, dtypes, loss_dtype, x64):
    """Optax stores the loss in the dtype of the first parameter."""
    with jax.enable_x64(x64):
      x, y = plain_optax.data()
      model = MLP(dtypes, nnx.Rngs(0))
      optimizer = MAKE['optax_lbfgs'](model)
      before = read(model, optimizer)
      loss_fn = lambda model: jnp.mean((model(x) - y) ** 2).astype(loss_dtype)
      with self.assertRaisesRegex(
        ValueError, f'round the loss from {loss_dtype} to {dtypes[0]}'
      ):
        optimizer.value_and_update(loss_fn, from_state=True)(model)
      jax.tree.map(
        np.testing.assert_array_equal, read(model, optimizer), before
      )


if __name__ == '__main__':
  absltest.main()
