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
"""Searches that fail, and losses of every dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_optax
from absl.testing import absltest, parameterized

from flax import nnx


class MLP(nnx.Module):
  def __init__(self, rngs):
    self.first = nnx.Linear(3, 4, rngs=rngs)
    self.second = nnx.Linear(4, 2, rngs=rngs)

  def __call__(self, x):
    return self.second(jnp.tanh(self.first(x)))


def make(seed=0, **kwargs):
  model = MLP(nnx.Rngs(seed))
  return model, nnx.optimizers.BacktrackingLinesearch(
    model, wrt=nnx.Param, **kwargs
  )


@nnx.jit
def train_step(model, optimizer, x, y, scale=1.0):
  loss_fn = lambda model: scale * jnp.mean((model(x) - y) ** 2)
  loss, grads = nnx.value_and_grad(loss_fn)(model)
  optimizer.update(model, grads, value=loss, value_fn=loss_fn)
  return loss, grads


def read(*nodes):
  return jax.tree.map(np.array, nnx.as_pure(nnx.state(nodes)))


class TestRecovery(parameterized.TestCase):
  @parameterized.product(
    scale=(jnp.nan, jnp.inf, -jnp.inf), store_grad=(False, True)
  )
  def test_loss_that_is_not_finite(self, scale, store_grad):
    x, y = plain_optax.data()
    model, optimizer = make(
      tx=optax.sgd(1.0, momentum=0.9), store_grad=store_grad
    )
    for _ in range(2):
      train_step(model, optimizer, x, y)
    direction = lambda: optimizer.opt_state.inner_state[0]
    before, momentum = read(model), read(direction())
    train_step(model, optimizer, x, y, scale)

    info = optimizer.linesearch_info
    self.assertTrue(info.failed)
    self.assertEqual(info.learning_rate, 0.0)
    jax.tree.map(np.testing.assert_array_equal, read(model), before)
    jax.tree.map(np.testing.assert_array_equal, read(direction()), momentum)

    first, _ = train_step(model, optimizer, x, y)
    info = optimizer.linesearch_info
    self.assertFalse(info.failed)
    # The search started from ``max_learning_rate``, which is 1.
    np.testing.assert_allclose(
      info.learning_rate, 0.8 ** (info.num_steps - 1.0), rtol=1e-6
    )
    second, _ = train_step(model, optimizer, x, y)
    self.assertLess(second, first)

  def test_plain_optax_does_not_recover(self):
    """The fault that the type mends; if it is gone, so may be the mending."""
    x, y = plain_optax.data()
    model = MLP(nnx.Rngs(0))
    tx = optax.chain(
      optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15)
    )
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, fail):
      grads = nnx.grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
      value_fn = lambda m: jnp.where(
        fail, jnp.nan, jnp.mean((m(x) - y) ** 2)
      )
      optimizer.update(model, grads, value=value_fn(model), value_fn=value_fn)

    step(model, optimizer, True)
    before = read(model)
    step(model, optimizer, False)
    jax.tree.map(np.testing.assert_array_equal, read(model), before)

  @parameterized.parameters(0.5, 1.5)
  def test_direction_of_ascent(self, increase_factor):
    x, y = plain_optax.data()
    model, optimizer = make(
      tx=optax.scale(1.0), increase_factor=increase_factor,
      max_learning_rate=0.25, max_backtracking_steps=3,
    )
    before = read(model)
    for _ in range(2):  # the second search starts from the maximum again
      train_step(model, optimizer, x, y)
      info = optimizer.linesearch_info
      self.assertTrue(info.failed)
      self.assertEqual(info.learning_rate, 0.0)
      self.assertEqual(info.num_steps, 4)
      self.assertGreater(info.decrease_error, 0.0)
      jax.tree.map(np.testing.assert_array_equal, read(model), before)
    stored = optimizer.opt_state.inner_state[1].learning_rate
    np.testing.assert_allclose(increase_factor * stored[...], max(
      0.25, 0.25 * increase_factor
    ))

  def test_failure_at_a_loss_barrier(self):
    """Trials beyond the barrier are NaN; shorter ones are accepted."""

    class Scalar(nnx.Module):
      def __init__(self):
        self.w = nnx.Param(jnp.array([2.0]))

    model = Scalar()
    optimizer = nnx.optimizers.BacktrackingLinesearch(
      model, optax.sgd(10.0), wrt=nnx.Param
    )
    loss_fn = lambda m: (m.w[0] - jnp.log(m.w[0]))  # minimum at 1

    @nnx.jit
    def step(model, optimizer):
      loss, grads = nnx.value_and_grad(loss_fn)(model)
      optimizer.update(model, grads, value=loss, value_fn=loss_fn)

    for _ in range(20):
      step(model, optimizer)
      self.assertFalse(optimizer.linesearch_info.failed)
    np.testing.assert_allclose(model.w, [1.0], atol=1e-2)


class TestLossDtypes(parameterized.TestCase):
  @parameterized.product(
    loss_dtype=('bfloat16', 'float16', 'float32'),
    param_dtype=('bfloat16', 'float32'),
    store_grad=(True, False),
  )
  def test_low_precision(self, loss_dtype, param_dtype, store_grad):
    x, y = plain_optax.data()
    model = nnx.Linear(3, 2, param_dtype=param_dtype, rngs=nnx.Rngs(0))
    optimizer = nnx.optimizers.BacktrackingLinesearch(
      model, wrt=nnx.Param, store_grad=store_grad
    )
    n = 0

    @nnx.jit
    def step(model, optimizer):
      nonlocal n
      n += 1
      loss_fn = lambda m: jnp.mean((m(x) - y) ** 2).astype(loss_dtype)
      loss, grads = nnx.value_and_grad(loss_fn)(model)
      optimizer.update(model, grads, value=loss, value_fn=loss_fn)
      return loss

    losses = [step(model, optimizer) for _ in range(5)]
    self.assertEqual(n, 1)
    self.assertLess(losses[-1], losses[0])
    self.assertEqual(model.kernel.dtype, param_dtype)

  @parameterized.parameters('float32', 'float64')
  def test_x64(self, dtype):
    with jax.enable_x64(True):
      x, y = plain_optax.data()
      model = nnx.Linear(
        3, 2, param_dtype=dtype, dtype=dtype, rngs=nnx.Rngs(0)
      )
      optimizer = nnx.optimizers.BacktrackingLinesearch(
        model, wrt=nnx.Param, store_grad=True
      )

      @nnx.jit
      def step(model, optimizer):
        loss_fn = lambda m: jnp.mean((m(x) - y) ** 2)
        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads, value=loss, value_fn=loss_fn)
        return loss

      losses = [step(model, optimizer) for _ in range(3)]
      self.assertLess(losses[-1], losses[0])
      self.assertEqual(losses[0].dtype, dtype)
      self.assertEqual(model.kernel.dtype, dtype)


if __name__ == '__main__':
  absltest.main()
