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

import jax.numpy as jnp
import numpy as np
import optax
import plain_optax
from absl.testing import absltest, parameterized

from flax import nnx

close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
SCALE = 1.0  # a global that a test rebinds


class MLP(nnx.Module):
  def __init__(self, rngs):
    self.first = nnx.Linear(3, 4, rngs=rngs)
    self.second = nnx.Linear(4, 2, rngs=rngs)

  def __call__(self, x):
    return self.second(jnp.tanh(self.first(x)))

  def scaled(self, x):
    return SCALE * self(x)


def loss_fn(model, x, y):
  return jnp.mean((model(x) - y) ** 2)


def make_pair(tx):
  model = MLP(nnx.Rngs(0))
  return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


class TestMeansTheSame(parameterized.TestCase):
  """What a function captures may change between two calls."""

  def run_twice(self, loss, change, *args):
    """Losses before and after a change, without learning in between."""
    model, optimizer = make_pair(optax.sgd(0.0))
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
    model, optimizer = make_pair(optax.sgd(0.0))
    values = [
      optimizer.value_and_update(functools.partial(loss, factor=f))(model, x, y)
      for f in (1.0, 1.0, 3.0)
    ]
    close(values, [values[0], values[0], 3 * values[0]])

  def test_argument_that_changes_each_time(self):
    """A weight that is annealed: right in every step, compiled or not."""
    x, y = plain_optax.data()
    loss = lambda model, x, y, weight: weight * loss_fn(model, x, y)
    model, optimizer = make_pair(optax.sgd(0.0))
    expected = float(loss_fn(model, x, y))
    for weight in np.linspace(1.0, 0.1, 12).tolist():
      value = optimizer.value_and_update(loss)(model, x, y, weight)
      close(value, weight * expected)

  def test_class_attribute(self):
    class Config:
      factor = 1.0

    x, y = plain_optax.data()
    before, after = self.run_twice(
      lambda model: Config.factor * loss_fn(model, x, y),
      lambda: setattr(Config, 'factor', 3.0),
    )
    close(after, 3 * before)

  def test_module_in_class_attribute(self):
    class Config:
      teacher = nnx.Linear(3, 2, rngs=nnx.Rngs(1))

    x, y = plain_optax.data()

    def change():
      Config.teacher.kernel[...] += 1.0

    before, after = self.run_twice(
      lambda model: loss_fn(model, x, Config.teacher(x)), change
    )
    self.assertNotAlmostEqual(before, after, 2)

  def test_function_attribute(self):
    x, y = plain_optax.data()

    def loss(model):
      return loss.factor * loss_fn(model, x, y)

    loss.factor = 1.0
    before, after = self.run_twice(
      loss, lambda: setattr(loss, 'factor', 3.0)
    )
    close(after, 3 * before)

  def test_builtin_method(self):
    x, y = plain_optax.data()
    config = {'factor': 1.0}
    get = config.get
    before, after = self.run_twice(
      lambda model: get('factor') * loss_fn(model, x, y),
      lambda: config.update(factor=3.0),
    )
    close(after, 3 * before)

  def test_signed_zero(self):
    x, y = plain_optax.data()
    make = lambda zero: lambda model: jnp.copysign(
      loss_fn(model, x, y), zero
    )
    model, optimizer = make_pair(optax.sgd(0.0))
    plus, minus = (
      optimizer.value_and_update(make(zero))(model) for zero in (0.0, -0.0)
    )
    close(plus, -minus)

  def test_global_of_the_model(self):
    def change():
      global SCALE
      SCALE = 3.0

    x, y = plain_optax.data()
    try:
      before, after = self.run_twice(
        lambda model: jnp.mean((model.scaled(x) - y) ** 2), change
      )
    finally:
      globals()['SCALE'] = 1.0
    self.assertNotAlmostEqual(before, after, 2)

  def test_function_held_by_the_model(self):
    x, y = plain_optax.data()
    factors = [1.0]
    model, optimizer = make_pair(optax.sgd(0.0))
    model.activation = lambda x: factors[0] * x
    loss = lambda model: jnp.mean((model.activation(model(x)) - y) ** 2)
    step = optimizer.value_and_update(loss)
    before = step(model)
    factors[0] = 3.0
    close(step(model), loss(model))
    self.assertNotAlmostEqual(float(before), float(step(model)), 2)

  def test_schedule_that_changes(self):
    class Plateau:
      rate = 0.1

      def __call__(self, step):
        return self.rate

    x, y = plain_optax.data()
    plateau = Plateau()
    model, optimizer = make_pair(optax.sgd(plateau))
    step = optimizer.value_and_update(loss_fn)
    step(model, x, y)
    before = jnp.array(model.first.kernel)
    plateau.rate = 0.0
    step(model, x, y)
    np.testing.assert_array_equal(model.first.kernel[...], before)

  def test_counters_are_effects(self):
    """What a loss only adds to does not decide what it means."""
    n, log = 0, []
    x, y = plain_optax.data()

    def loss(model):
      nonlocal n
      n += 1
      log.append(x.shape)
      return loss_fn(model, x, y)

    model, optimizer = make_pair(optax.adam(1e-2))
    optimizer.value_and_update(loss)(model)
    before = n
    self.assertGreater(before, 0)
    self.assertLen(log, n)
    for _ in range(3):
      optimizer.value_and_update(loss)(model)
    self.assertEqual(n, before)  # compiled, not called


if __name__ == '__main__':
  absltest.main()
