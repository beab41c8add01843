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
"""What a forward pass does to model and arguments, and what of it is kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized

from flax import errors, nnx

close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
MODES = ((True, True), (True, False), (False, False))


class Vector(nnx.Module):
  def __init__(self):
    self.w = nnx.Param(jnp.array([1.0, -2.0]))


class Counter(nnx.Module):
  def __init__(self):
    self.n = nnx.BatchStat(jnp.zeros(()))


def make(tx=None, graph=None, model=None):
  model = model or Vector()
  tx = tx or optax.sgd(0.1)
  return model, nnx.Optimizer(model, tx, wrt=nnx.Param, graph=graph)


def read(*nodes):
  state = nnx.state(nodes, nnx.Not(nnx.RngKey))
  return jax.tree.map(np.array, nnx.as_pure(state))


def assert_raises_unchanged(test, error, message, step, *nodes):
  before = read(*nodes)
  with test.assertRaisesRegex(error, message):
    step()
  jax.tree.map(np.testing.assert_array_equal, read(*nodes), before)


class TestParameters(parameterized.TestCase):
  """A loss may set parameters itself; the update starts from there."""

  @parameterized.product(
    wrapper=('WeightNorm', 'SpectralNorm'), jit=(True, False)
  )
  def test_normalizing_layers(self, wrapper, jit):
    loss_fn = lambda model, x: jnp.mean(model(x) ** 2)

    def build():
      layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
      return getattr(nnx, wrapper)(layer, rngs=nnx.Rngs(1))

    if wrapper == 'SpectralNorm':
      loss_fn = lambda model, x: jnp.mean(model(x, update_stats=True) ** 2)
    x = jnp.array([[1.0, 2.0], [3.0, -1.0]])
    model, optimizer = make(model=build())
    twin, expected = make(model=build())
    step = lambda model, optimizer: optimizer.value_and_update(loss_fn)(
      model, x
    )
    step = nnx.jit(step) if jit else step
    for _ in range(3):
      value = step(model, optimizer)
      loss, grads = nnx.value_and_grad(loss_fn)(twin, x)
      expected.update(twin, grads)
      close(value, loss)
    jax.tree.map(close, read(model), read(twin))

  @parameterized.product(mode=MODES, jit=(True, False))
  def test_projection(self, mode, jit):
    graph, graph_updates = mode

    def loss_fn(model):
      model.w[...] = jnp.clip(model.w[...], -0.5, 0.5)
      return jnp.sum(model.w[...] ** 2) / 2

    model, optimizer = make(graph=graph)
    step = lambda model, optimizer: optimizer.value_and_update(loss_fn)(model)
    if jit:
      step = nnx.jit(step, graph=graph, graph_updates=graph_updates)
    step(model, optimizer)
    # The gradient through the clipping is 0 for both.
    close(model.w[...], [0.5, -0.5])

  def test_minimize(self):
    def loss_fn(model):
      model.w[...] = jnp.maximum(model.w[...], 0.0)
      return jnp.sum((model.w[...] - 3.0) ** 2) / 2

    model, optimizer = make()
    nnx.optimizers.minimize(loss_fn, model, optimizer, max_steps=2, gtol=0)
    twin, expected = make()
    for _ in range(2):
      expected.value_and_update(loss_fn)(twin)
    close(model.w[...], twin.w[...])

  def test_error_restores_them(self):
    def loss_fn(model):
      model.w[...] = jnp.clip(model.w[...], -0.5, 0.5)
      return jnp.sum(model.w[...])

    class Refusing(nnx.Optimizer):
      def update(self, model, grads, **kwargs):
        raise RuntimeError('no')

    model = Vector()
    optimizer = Refusing(model, optax.sgd(0.1), wrt=nnx.Param)
    step = lambda: optimizer.value_and_update(loss_fn)(model)
    assert_raises_unchanged(
      self, RuntimeError, 'no', step, model, optimizer
    )

  def test_new_parameter_error(self):
    def loss_fn(model):
      model.extra = nnx.Param(jnp.ones(()))
      return jnp.sum(model.w[...]) * model.extra

    for graph in (True, False):
      model, optimizer = make(graph=graph)
      step = lambda: optimizer.value_and_update(loss_fn)(model)
      assert_raises_unchanged(
        self, ValueError, 'creates the parameter extra', step, model, optimizer
      )


class TestStructure(parameterized.TestCase):
  @parameterized.parameters(True, False)
  def test_new_module_error(self, graph):
    def loss_fn(model):
      model.lazy = Counter()
      return jnp.sum(model.w[...])

    model, optimizer = make(graph=graph)
    step = lambda: optimizer.value_and_update(loss_fn)(model)
    assert_raises_unchanged(
      self, ValueError, r'creates lazy\.n of the model.*__init__', step, model,
      optimizer,
    )  # fmt: skip

  def test_new_module_in_an_argument_error(self):
    class Box(nnx.Module):
      pass

    def loss_fn(model, box):
      box.lazy = Counter()
      return jnp.sum(model.w[...])

    box = Box()
    model, optimizer = make()
    step = lambda: optimizer.value_and_update(loss_fn)(model, box)
    assert_raises_unchanged(
      self, ValueError, 'an argument of the loss', step, model, optimizer
    )
    self.assertFalse(hasattr(box, 'lazy'))


class TestSharing(parameterized.TestCase):
  @parameterized.parameters(True, False)
  def test_same_argument_twice(self, jit):
    loss_fn = lambda model, a, b: jnp.sum(
      model.w[...] * (a.normal((2,)) - b.normal((2,)))
    )
    rngs, twin = nnx.Rngs(0), nnx.Rngs(0)
    model, optimizer = make(optax.sgd(0.0), graph=True)
    step = lambda model, optimizer, rngs: optimizer.value_and_update(loss_fn)(
      model, rngs, rngs
    )
    value = (nnx.jit(step) if jit else step)(model, optimizer, rngs)
    close(value, loss_fn(model, twin, twin))
    self.assertEqual(rngs.default.count[...], 2)

  def test_arguments_that_share_a_variable(self):
    a, b = Counter(), Counter()
    b.n = a.n

    def loss_fn(model, pair):
      pair['a'].n[...] += 1
      pair['b'].n[...] += 10
      return jnp.sum(model.w[...])

    model, optimizer = make(graph=True)
    optimizer.value_and_update(loss_fn)(model, {'a': a, 'b': b})
    self.assertEqual(a.n[...], 11)

  def test_argument_that_shares_with_the_model_error(self):
    model, optimizer = make()
    model.head = Vector()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    loss_fn = lambda model, head: jnp.sum(model.w[...] * head.w)
    step = lambda: optimizer.value_and_update(loss_fn)(model, model.head)
    assert_raises_unchanged(
      self, ValueError, r'share a Variable.*head\.w in the model', step, model,
      optimizer,
    )  # fmt: skip

  def test_model_of_another_optimizer_error(self):
    model, other = Vector(), Vector()
    optimizer = nnx.ModelAndOptimizer(model, optax.sgd(0.1))
    loss_fn = lambda model: jnp.sum(model.w[...])
    step = lambda: optimizer.value_and_update(loss_fn)(other)
    assert_raises_unchanged(
      self, ValueError, 'another one was given', step, optimizer, other
    )
    before = jnp.array(model.w)
    optimizer.value_and_update(loss_fn)(model)
    close(model.w[...], before - 0.1)

  def test_model_of_other_parameters_error(self):
    _, optimizer = make(optax.adam(0.1))
    other = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    loss_fn = lambda model: jnp.sum(model.kernel[...])
    with self.assertRaises(ValueError) as caught:
      optimizer.value_and_update(loss_fn)(other)
    self.assertIn('same `wrt`', caught.exception.__notes__[0])

  def test_captured_rngs_error(self):
    rngs = nnx.Rngs(0)
    loss_fn = lambda model: jnp.sum(model.w[...] * rngs.normal((2,)))
    model, optimizer = make()
    with self.assertRaises(errors.TraceContextError) as caught:
      optimizer.value_and_update(loss_fn)(model)
    self.assertIn('as an argument', caught.exception.__notes__[0])


class TestAux(parameterized.TestCase):
  def test_objects_of_the_user(self):
    class Output:
      def __init__(self, value):
        self.value = value

    loss_fn = lambda model, x: (jnp.sum(model.w[...]), Output(x))
    model, optimizer = make()
    step = optimizer.value_and_update(loss_fn, has_aux=True)
    for x in (jnp.ones(2), jnp.zeros(2)):
      np.testing.assert_array_equal(step(model, x)[1].value, x)

  def test_a_new_container_each_time(self):
    loss_fn = lambda model: (jnp.sum(model.w[...]), {'names': {'a'}, 'n': 3})
    model, optimizer = make()
    step = optimizer.value_and_update(loss_fn, has_aux=True)
    for _ in range(3):
      _, aux = step(model)
      self.assertEqual(aux, {'names': {'a'}, 'n': 3})
      self.assertIsInstance(aux['n'], int)
      aux['names'].add('b')

  def test_pair_without_has_aux_error(self):
    loss_fn = lambda model: (jnp.sum(model.w[...]), 1)
    model, optimizer = make()
    step = lambda: optimizer.value_and_update(loss_fn)(model)
    assert_raises_unchanged(
      self, TypeError, 'has_aux=True', step, model, optimizer
    )


if __name__ == '__main__':
  absltest.main()
