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
"""Eager steps notice when what their loss function captures has changed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_optax
from absl.testing import absltest, parameterized

from flax import nnx
from flax.nnx.training.captures import NotConstant, key_of

close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
SCALE = 1.0  # a global that a test rebinds


class MLP(nnx.Module):
  def __init__(self, rngs):
    self.first = nnx.Linear(3, 4, rngs=rngs)
    self.second = nnx.Linear(4, 2, rngs=rngs)

  def __call__(self, x):
    return self.second(jnp.tanh(self.first(x)))


def loss_fn(model, x, y):
  return jnp.mean((model(x) - y) ** 2)


def make(tx):
  model = MLP(nnx.Rngs(0))
  return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


class TestMeansTheSame(parameterized.TestCase):
  """What a function captures may change between two calls."""

  def run_twice(self, loss, change, *args):
    """Losses before and after a change, without learning in between."""
    model, optimizer = make(optax.sgd(0.0))
    losses = []
    for _ in range(2):
      losses.append(float(optimizer.value_and_update(loss)(model, *args)))
    change()
    for _ in range(2):
      losses.append(float(optimizer.value_and_update(loss)(model, *args)))
    self.assertEqual(losses[0], losses[1])
    self.assertEqual(losses[2], losses[3])
    return losses[0], losses[2]

  def test_closure(self):
    x, y = plain_optax.data()
    factor = 1.0

    def loss(model):
      return factor * loss_fn(model, x, y)

    def change():
      nonlocal factor
      factor = 3.0

    before, after = self.run_twice(loss, change)
    close(after, 3 * before)

  def test_closure_over_an_array(self):
    x, y = plain_optax.data()
    factor = jnp.array(1.0)

    def loss(model):
      return factor * loss_fn(model, x, y)

    def change():
      nonlocal factor
      factor = jnp.array(3.0)

    before, after = self.run_twice(loss, change)
    close(after, 3 * before)

  def test_numpy_array_changed_in_place(self):
    x, y = plain_optax.data()
    factor = np.ones(1)

    def change():
      factor[:] = 3.0

    before, after = self.run_twice(
      lambda model: factor[0] * loss_fn(model, x, y), change
    )
    close(after, 3 * before)

  def test_container_changed_in_place(self):
    x, y = plain_optax.data()
    config = {'factors': [1.0]}

    def change():
      config['factors'][0] = 3.0

    before, after = self.run_twice(
      lambda model: config['factors'][0] * loss_fn(model, x, y), change
    )
    close(after, 3 * before)

  def test_object_changed_in_place(self):
    class Config:
      factor = 1.0

    x, y = plain_optax.data()
    config = Config()
    before, after = self.run_twice(
      lambda model: config.factor * loss_fn(model, x, y),
      lambda: setattr(config, 'factor', 3.0),
    )
    close(after, 3 * before)

  def test_global_of_a_helper(self):
    x, y = plain_optax.data()

    def helper(value):
      return SCALE * value

    def change():
      global SCALE
      SCALE = 3.0

    try:
      before, after = self.run_twice(
        lambda model: helper(loss_fn(model, x, y)), change
      )
    finally:
      globals()['SCALE'] = 1.0
    close(after, 3 * before)

  def test_captured_variable(self):
    x, y = plain_optax.data()
    factor = nnx.Variable(jnp.array(1.0))

    def change():
      factor[...] = 3.0

    before, after = self.run_twice(
      lambda model: factor[...] * loss_fn(model, x, y), change
    )
    close(after, 3 * before)

  def test_partial(self):
    x, y = plain_optax.data()
    loss = lambda model, x, y, *, factor: factor * loss_fn(model, x, y)
    model, optimizer = make(optax.sgd(0.0))
    values = [
      optimizer.value_and_update(functools.partial(loss, factor=f))(model, x, y)
      for f in (1.0, 1.0, 3.0)
    ]
    close(values, [values[0], values[0], 3 * values[0]])

  def test_argument_that_changes_each_time(self):
    """A weight that is annealed: right in every step, compiled or not."""
    x, y = plain_optax.data()
    loss = lambda model, x, y, weight: weight * loss_fn(model, x, y)
    model, optimizer = make(optax.sgd(0.0))
    expected = float(loss_fn(model, x, y))
    for weight in np.linspace(1.0, 0.1, 12).tolist():
      value = optimizer.value_and_update(loss)(model, x, y, weight)
      close(value, weight * expected)

  def test_counting_function(self):
    """Python effects on what a function captures happen at every call."""
    n = 0
    x, y = plain_optax.data()

    def loss(model):
      nonlocal n
      n += 1
      return loss_fn(model, x, y)

    model, optimizer = make(optax.adam(1e-2))
    for _ in range(6):
      before = n
      optimizer.value_and_update(loss)(model)
      self.assertGreater(n, before)


class TestKeys(parameterized.TestCase):
  def test_equal(self):
    array = jnp.ones(3)

    def make(factor):
      return lambda x: factor * jnp.sum(x) * array

    self.assertEqual(key_of(make(2.0)), key_of(make(2.0)))
    self.assertNotEqual(key_of(make(2.0)), key_of(make(3.0)))
    self.assertNotEqual(key_of(make(1)), key_of(make(True)))
    self.assertEqual(key_of({'a': [1, None]}), key_of({'a': [1, None]}))
    self.assertNotEqual(key_of({'a': [1]}), key_of({'a': (1,)}))
    self.assertEqual(key_of(array), key_of(array))
    self.assertNotEqual(key_of(array), key_of(jnp.ones(3)))
    self.assertEqual(key_of(np.ones(3)), key_of(np.ones(3)))
    self.assertNotEqual(key_of(np.ones(3)), key_of(np.ones(3, np.float32)))

  def test_functions_that_refer_to_each_other(self):
    def even(n):
      return n == 0 or odd(n - 1)

    def odd(n):
      return n != 0 and even(n - 1)

    self.assertEqual(key_of(even), key_of(even))
    self.assertNotEqual(key_of(even), key_of(odd))

  def test_wrapped_functions(self):
    """A library's wrapper hides no function of the user."""
    for wrap in (jax.jit, jax.checkpoint, jax.vmap, functools.cache):
      factor = 1.0
      wrapped = wrap(lambda x: factor * x)
      before = key_of(wrapped)
      self.assertEqual(key_of(wrapped), before)
      factor = 2.0
      self.assertNotEqual(key_of(wrapped), before)

  def test_not_constant_error(self):
    class Config:
      pass

    model = MLP(nnx.Rngs(0))
    for x in (
      model, model.first.kernel, model.__call__, Config(),
      np.array([object()]), np.zeros(1 << 20), lambda: model, [model],
      functools.partial(loss_fn, model),
    ):  # fmt: skip
      with self.assertRaises(NotConstant):
        key_of(x)


if __name__ == '__main__':
  absltest.main()
