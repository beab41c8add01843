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
"""Eager steps compile once, and mean what they would mean uncompiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_optax
from absl.testing import absltest, parameterized
from jax.sharding import AxisType

from flax import nnx
from flax.nnx.training import eager

close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


class MLP(nnx.Module):
  """Counts how often Python runs its forward pass."""

  num_traces = 0

  def __init__(self, rngs):
    self.first = nnx.Linear(3, 4, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.second = nnx.Linear(4, 2, rngs=rngs)

  def __call__(self, x):
    MLP.num_traces += 1
    return self.second(self.dropout(jnp.tanh(self.first(x))))


def loss_fn(model, x, y):
  return jnp.mean((model(x) - y) ** 2)


def make(tx=None, graph=None, optimizer_type=nnx.Optimizer):
  model = MLP(nnx.Rngs(0))
  tx = tx or optax.lbfgs()
  return model, optimizer_type(model, tx, wrt=nnx.Param, graph=graph)


def traces(function, *args, **kwargs):
  """How often a call runs the forward pass of the model in Python."""
  before = MLP.num_traces
  function(*args, **kwargs)
  return MLP.num_traces - before


def read(*nodes):
  state = nnx.state(nodes, nnx.Not(nnx.RngKey))
  return jax.tree.map(np.array, nnx.as_pure(state))


class TestCompilesOnce(parameterized.TestCase):
  @parameterized.product(
    tx=(optax.lbfgs(), optax.adam(1e-2)), graph=(True, False)
  )
  def test_traces_once(self, tx, graph):
    x, y = plain_optax.data()
    loss = lambda model, x, y: loss_fn(model, x, y)
    model, optimizer = make(tx, graph)
    kernel = model.first.kernel
    step = lambda x: optimizer.value_and_update(loss)(model, x, y)

    self.assertGreater(traces(step, x), 0)
    self.assertEqual(traces(step, x), 0)
    self.assertEqual(traces(step, 2 * x), 0)  # other data of this shape
    self.assertGreater(traces(step, x[:1]), 0)
    self.assertEqual(traces(step, x), 0)

    self.assertIs(model.first.kernel, kernel)
    self.assertEqual(optimizer.step[...], 5)
    self.assertEqual(model.dropout.rngs.count[...], 5)

  @parameterized.product(
    tx=(optax.lbfgs(), optax.adam(1e-2)), graph=(True, False)
  )
  def test_equals_jit(self, tx, graph):
    x, y = plain_optax.data()
    model, optimizer = make(tx, graph)
    twin, expected = make(tx, graph)
    step = nnx.jit(
      lambda model, optimizer: optimizer.value_and_update(loss_fn)(model, x, y),
      graph=graph, graph_updates=graph,
    )  # fmt: skip
    for _ in range(4):
      close(
        optimizer.value_and_update(loss_fn)(model, x, y), step(twin, expected)
      )
    jax.tree.map(close, read(model, optimizer), read(twin, expected))

  def test_new_function_of_the_same_code(self):
    x, y = map(jnp.asarray, plain_optax.data())
    model, optimizer = make()
    step = lambda: optimizer.value_and_update(lambda m: loss_fn(m, x, y))(model)

    self.assertGreater(traces(step), 0)
    self.assertEqual(traces(step), 0)

  @parameterized.parameters(True, False)
  def test_new_optimizer_that_means_the_same(self, graph):
    """Restarts from several seeds compile once."""
    x, y = plain_optax.data()
    loss = lambda model, x, y: loss_fn(model, x, y)
    for seed in range(3):
      model = MLP(nnx.Rngs(seed))
      optimizer = nnx.Optimizer(
        model, optax.lbfgs(memory_size=4), wrt=nnx.Param, graph=graph
      )
      tx = optimizer.tx
      n = traces(optimizer.value_and_update(loss), model, x, y)
      self.assertEqual(n > 0, seed == 0)
      self.assertIs(optimizer.tx, tx)

  def test_restarts_of_minimize(self):
    x, y = plain_optax.data()
    loss = lambda model, x, y: loss_fn(model, x, y)
    for seed in range(3):
      model = MLP(nnx.Rngs(seed))
      optimizer = nnx.optimizers.LBFGS(model, wrt=nnx.Param)
      n = traces(
        nnx.optimizers.minimize, loss, model, optimizer, x, y, max_steps=2
      )
      self.assertEqual(n > 0, seed == 0)

  def test_train_and_eval_mode(self):
    x, y = plain_optax.data()
    model, optimizer = make()
    loss = lambda model, x, y: loss_fn(model, x, y)
    step = lambda: optimizer.value_and_update(loss)(model, x, y)
    step()
    count = model.dropout.rngs.count[...]
    model.eval()
    self.assertGreater(traces(step), 0)
    self.assertEqual(traces(step), 0)
    self.assertEqual(model.dropout.rngs.count[...], count)
    model.train()
    self.assertEqual(traces(step), 0)
    self.assertEqual(model.dropout.rngs.count[...], count + 1)

  def test_python_arguments_keep_their_values(self):
    seen = set()
    x, y = plain_optax.data()

    def loss(model, x, y, reduction, half, extra=None, options=()):
      self.assertIsInstance(half, bool)
      self.assertIsNone(extra)
      self.assertEqual(options, {'power': 2, 'names': ('a', 'b')})
      self.assertIsInstance(options['power'], int)
      losses = (model(x) - y) ** options['power']
      value = losses.mean() if reduction == 'mean' else losses.sum()
      return value / 2 if half else value

    model, optimizer = make(optax.sgd(0.0))
    model.eval()
    options = {'power': 2, 'names': ('a', 'b')}
    expected = float(loss_fn(model, x, y))
    step = optimizer.value_and_update(loss)
    for _ in range(2):
      for reduction, factor in (('mean', 1), ('sum', y.size)):
        for half in (False, True):
          value = step(
            model, x, y, reduction, half, extra=None, options=options
          )
          close(value, expected * factor / (2 if half else 1))
          seen.add(float(value))
    self.assertLen(seen, 4)


class TestRunsAsItIs(parameterized.TestCase):
  """What cannot be compiled works all the same."""

  def test_value_dependent_python(self):
    x, y = plain_optax.data()

    def loss(model, x, y):
      if float(x[0, 0]) > 100:
        return jnp.zeros(())
      return loss_fn(model, x, y)

    model, optimizer = make(optax.adam(1e-2))
    model.eval()
    losses = [optimizer.value_and_update(loss)(model, x, y) for _ in range(4)]
    self.assertLess(losses[-1], losses[0])
    self.assertEqual(optimizer.value_and_update(loss)(model, 1e4 + x, y), 0.0)

  @parameterized.parameters(True, False)
  def test_new_variables(self, graph):
    class Lazy(nnx.Module):
      def __init__(self, rngs):
        self.linear = nnx.Linear(3, 2, rngs=rngs)

      def __call__(self, x):
        if not hasattr(self, 'calls'):
          self.calls = nnx.Variable(jnp.array(0))
        self.calls[...] += 1
        MLP.num_traces += 1
        return self.linear(x)

    x, y = plain_optax.data()
    model = Lazy(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.lbfgs(), wrt=nnx.Param, graph=graph)
    for number in range(3):
      optimizer.value_and_update(loss_fn)(model, x, y)
      self.assertEqual(model.calls[...], number + 1)
    step = optimizer.value_and_update(loss_fn)
    self.assertEqual(traces(step, model, x, y), 0)

  def test_error_in_the_loss(self):
    x, y = plain_optax.data()

    def loss(model, x, y):
      return loss_fn(model, x, y)

    model, optimizer = make()
    before = read(model, optimizer)
    step = optimizer.value_and_update(loss)
    for _ in range(2):
      with self.assertRaisesRegex(TypeError, 'incompatible shapes'):
        step(model, x, y[:, :1].T)
      jax.tree.map(
        np.testing.assert_array_equal, read(model, optimizer), before
      )
    step(model, x, y)  # does not hold it against the function
    self.assertEqual(traces(step, model, x, y), 0)

  def test_update_of_a_subclass(self):
    """A user's ``update`` may do what a compiled function would not."""

    class Logging(nnx.Optimizer):
      log = []

      def update(self, model, grads, **kwargs):
        self.log.append(float(kwargs['value']))
        return super().update(model, grads, **kwargs)

    x, y = plain_optax.data()
    model, optimizer = make(optax.polyak_sgd(), optimizer_type=Logging)
    losses = [
      float(optimizer.value_and_update(loss_fn)(model, x, y)) for _ in range(3)
    ]
    self.assertEqual(Logging.log, losses)

  def test_module_in_aux(self):
    x, y = plain_optax.data()
    loss = lambda model, x, y: (loss_fn(model, x, y), model)
    model, optimizer = make(optax.adam(1e-2))
    _, trial = optimizer.value_and_update(loss, has_aux=True)(model, x, y)
    self.assertIsInstance(trial, MLP)
    self.assertIsNot(trial, model)

  @parameterized.parameters(True, False)
  def test_under_transformations(self, graph):
    """There the caller compiles."""
    x, y = plain_optax.data()
    model, optimizer = make(optax.adam(1e-2), graph)
    step = nnx.jit(
      lambda model, optimizer: (
        eager.is_eager(),
        optimizer.value_and_update(loss_fn)(model, x, y),
      ),
      graph=graph, graph_updates=graph,
    )  # fmt: skip
    self.assertTrue(eager.is_eager())
    self.assertFalse(step(model, optimizer)[0])
    self.assertFalse(jax.vmap(lambda x: (eager.is_eager(), x))(x)[0].all())

  def test_disable_jit(self):
    x, y = plain_optax.data()
    model, optimizer = make(optax.adam(1e-2))
    step = lambda: optimizer.value_and_update(loss_fn)(model, x, y)
    step()
    with jax.disable_jit():
      self.assertGreater(traces(step), 0)
      self.assertGreater(traces(step), 0)


class TestSharding(parameterized.TestCase):
  def test_parameters_keep_their_sharding(self):
    num_devices = jax.device_count()
    mesh = jax.make_mesh(
      (num_devices,), ('data',), axis_types=(AxisType.Auto,)
    )
    spec = lambda *axes: jax.NamedSharding(mesh, jax.P(*axes))
    x, y = plain_optax.data(
      num_inputs=num_devices, num_outputs=num_devices
    )
    model = nnx.Linear(num_devices, num_devices, rngs=nnx.Rngs(0))
    model.kernel.set_value(jax.device_put(model.kernel[...], spec()))
    model.bias.set_value(jax.device_put(model.bias[...], spec()))
    optimizer = nnx.Optimizer(model, optax.sgd(1e-3, 0.9), wrt=nnx.Param)
    loss = lambda model, x, y: loss_fn(model, x, y)
    momentum = optimizer.opt_state[0].trace['kernel']
    momentum.set_value(jax.device_put(momentum[...], spec('data')))
    x, y = jax.device_put((x, y), spec())

    losses = [
      optimizer.value_and_update(loss)(model, x, y) for _ in range(3)
    ]

    self.assertLess(losses[-1], losses[0])
    # Left to the compiler, one of them takes the layout of the other.
    self.assertEqual(model.kernel.sharding.spec, jax.P())
    self.assertEqual(momentum.sharding.spec, jax.P('data'))


if __name__ == '__main__':
  absltest.main()
