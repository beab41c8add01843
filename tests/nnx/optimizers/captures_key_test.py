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
"""Keys of functions: equal only where the functions mean the same."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized

from flax import nnx
from flax.nnx.training.captures import NotConstant, key_of, key_of_modules


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

  def test_effects(self):
    """A counter does not change the key; a new counter does."""

    def make():
      n, log = 0, []

      def count(x):
        nonlocal n
        n += 1
        log.append(x)
        return x

      return count

    count = make()
    before = key_of(count)
    count(1)
    self.assertEqual(key_of(count), before)
    self.assertNotEqual(key_of(make()), before)

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

  def test_transformations(self):
    """New ones that mean the same are known."""
    for make in (
      optax.sgd, optax.adam, lambda rate: optax.lbfgs(rate),
      lambda rate: optax.chain(optax.clip(1.0), optax.adamw(rate)),
      lambda rate: optax.sgd(optax.linear_schedule(rate, 0.0, 9)),
      lambda rate: optax.contrib.sam(optax.sgd(rate), optax.sgd(0.1)),
    ):  # fmt: skip
      self.assertEqual(key_of(make(0.1)), key_of(make(0.1)))
      self.assertNotEqual(key_of(make(0.1)), key_of(make(0.2)))

  @parameterized.parameters('BacktrackingLinesearch', 'ZoomLinesearch', 'LBFGS')
  def test_optimizers(self, name):
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    make = lambda: getattr(nnx.optimizers, name)(model, wrt=nnx.Param)
    self.assertEqual(key_of(make().tx), key_of(make().tx))
    self.assertEqual(key_of_modules((make(), model)), key_of_modules(
      (make(), model)
    ))

  def test_modules(self):
    class Scaled(nnx.Module):
      def __init__(self, scale):
        self.scale = scale
        self.linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    keys = [key_of_modules(Scaled(scale)) for scale in (1.0, 1.0, 2.0, 1)]
    self.assertEqual(keys[0], keys[1])
    self.assertLen(set(keys), 3)
    with self.assertRaises(NotConstant):
      key_of_modules(Scaled(random.Random(0)))

  def test_not_constant_error(self):
    class Config:
      pass

    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    for x in (
      model, model.kernel, model.__call__, Config(),
      np.array([object()]), np.zeros(1 << 20), lambda: model, [model],
      random.random, {}.get, {}.__getitem__,
      functools.partial(jnp.add, model),
    ):  # fmt: skip
      with self.assertRaises(NotConstant):
        key_of(x)


if __name__ == '__main__':
  absltest.main()
