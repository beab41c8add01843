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
"""``nnx.optimizers.minimize``: what it does to model and optimizer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_optax
from absl.testing import absltest, parameterized
from jax.sharding import AxisType

from flax import nnx

MODES = ((True, True), (True, False), (False, False))
close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
minimize = nnx.optimizers.minimize


class MLP(nnx.Module):
  def __init__(self, rngs):
    self.first = nnx.Linear(3, 4, rngs=rngs)
    self.second = nnx.Linear(4, 2, rngs=rngs)

  def __call__(self, x):
    return self.second(jnp.tanh(self.first(x)))


class Noisy(nnx.Module):
  def __init__(self, rngs):
    self.linear = nnx.Linear(3, 2, rngs=rngs)
    self.norm = nnx.BatchNorm(2, momentum=0.5, rngs=rngs)
    self.dropout = nnx.Dropout(0.3, rngs=rngs)

  def __call__(self, x):
    return self.dropout(self.norm(self.linear(x)))


class Quadratic(nnx.Module):
  """Its loss is ``|w - target|^2 / 2``."""

  def __init__(self, size=4):
    self.w = nnx.Param(jnp.zeros(size))
    self.bias = nnx.Variable(jnp.zeros(()))


def quadratic(model, target=3.0):
  return 0.5 * jnp.sum((model.w[...] - target) ** 2)


def loss_fn(model, x, y):
  return jnp.mean((model(x) - y) ** 2)


def read(*nodes):
  state = nnx.state(nodes, nnx.Not(nnx.RngKey))
  return jax.tree.map(np.array, nnx.as_pure(state))


class TestMinimize(parameterized.TestCase):
  @parameterized.product(
    tx=(
      optax.adam(1e-2),
      optax.lbfgs(),
      optax.chain(optax.sgd(0.5), optax.scale_by_backtracking_linesearch(9)),
      optax.chain(optax.lbfgs(), optax.scale(0.5)),
      optax.MultiSteps(optax.lbfgs(), 2).gradient_transformation(),
    ),
    make=(MLP, Noisy),
    graph=(True, False),
  )
  def test_equals_steps_by_hand(self, tx, make, graph):
    x, y = plain_optax.data()
    model, twin = make(nnx.Rngs(0)), make(nnx.Rngs(0))
    optimizer, expected = (
      nnx.Optimizer(m, tx, wrt=nnx.Param, graph=graph) for m in (model, twin)
    )
    variables = dict(nnx.to_flat_state(nnx.state(model)))
    result = minimize(loss_fn, model, optimizer, x, y=y, max_steps=7, gtol=0)

    for _ in range(7):
      expected.value_and_update(loss_fn)(twin, x, y)
    loss, grads = nnx.value_and_grad(loss_fn)(nnx.clone(twin), x, y)
    self.assertEqual(result.num_steps, 7)
    self.assertEqual(optimizer.step[...], 7)
    self.assertFalse(result.converged)
    close(result.value, loss)
    close(result.grad_norm, optax.tree.norm(nnx.as_pure(grads)), rtol=1e-3)
    jax.tree.map(
      functools.partial(close, rtol=1e-3, atol=1e-5),
      read(model, optimizer), read(twin, expected),
    )  # fmt: skip
    for path, variable in nnx.to_flat_state(nnx.state(model)):
      self.assertIs(variable, variables[path])

  @parameterized.parameters(*MODES)
  def test_in_jit_traces_once(self, graph, graph_updates):
    n = 0
    x, y = plain_optax.data()
    model = MLP(nnx.Rngs(0))
    kernel = model.first.kernel
    optimizer = nnx.optimizers.LBFGS(model, wrt=nnx.Param, graph=graph)

    @nnx.jit(graph=graph, graph_updates=graph_updates)
    def fit(model, optimizer, x, y):
      nonlocal n
      n += 1
      return minimize(loss_fn, model, optimizer, x, y, max_steps=5)

    first = fit(model, optimizer, x, y)
    second = fit(model, optimizer, x, y)

    self.assertEqual(n, 1)
    self.assertIs(model.first.kernel, kernel)
    self.assertEqual(optimizer.step[...], 10)
    self.assertLess(second.value, first.value)

  def test_functional(self):
    model = Quadratic()
    optimizer = nnx.optimizers.LBFGS(model, wrt=nnx.Param)
    graphdef, state = nnx.split((model, optimizer))

    @jax.jit
    def fit(state):
      model, optimizer = nnx.merge(graphdef, state)
      result = minimize(quadratic, model, optimizer)
      return nnx.state((model, optimizer)), result

    state, result = fit(state)
    model, optimizer = nnx.merge(graphdef, state)
    self.assertTrue(result.converged)
    close(model.w[...], 3.0)

  def test_compiles_once(self):
    n = 0
    x, y = plain_optax.data()

    class Counting(MLP):
      def __call__(self, x):
        nonlocal n
        n += 1
        return super().__call__(x)

    model = Counting(nnx.Rngs(0))
    optimizer = nnx.optimizers.LBFGS(model, wrt=nnx.Param)
    loss = lambda model, x, y: loss_fn(model, x, y)
    minimize(loss, model, optimizer, x, y, max_steps=3)
    traces = n
    self.assertLess(traces, 20)  # however many steps
    minimize(loss, model, optimizer, 2 * x, y, max_steps=50, gtol=1e-3)
    self.assertEqual(n, traces)

  @parameterized.parameters(True, False)
  def test_ensemble(self, graph):
    """Each member stops by itself, as if it were alone."""
    targets = jnp.array([0.0, 1.0, 30.0])
    scales = jnp.array([1.0, 0.5, 0.3])

    def loss(model, target, scale):
      return scale * jnp.sum(jnp.cosh(model.w[...] - target / 10) - 1)

    def fit(model, optimizer, target, scale):
      return minimize(
        loss, model, optimizer, target, scale, gtol=1e-2, max_steps=100
      )

    vmap = functools.partial(nnx.vmap, graph=graph, graph_updates=graph)
    model = vmap(lambda _: Quadratic())(targets)
    tx = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(9))
    make = lambda model: nnx.Optimizer(model, tx, wrt=nnx.Param, graph=graph)
    optimizer = vmap(make)(model)
    results = vmap(fit)(model, optimizer, targets, scales)

    for i in range(3):
      alone = Quadratic()
      result = fit(alone, make(alone), targets[i], scales[i])
      self.assertEqual(results.num_steps[i], result.num_steps)
      self.assertEqual(optimizer.step[i], result.num_steps)
      close(model.w[i], alone.w[...])
      self.assertTrue(results.converged[i])
    self.assertLen(set(results.num_steps.tolist()), 3)
    self.assertEqual(results.num_steps[0], 0)

  @parameterized.parameters(True, False)
  def test_sharded_model(self, graph):
    num_devices = jax.device_count()
    mesh = jax.make_mesh(
      (num_devices,), ('data',), axis_types=(AxisType.Auto,)
    )
    sharding = jax.NamedSharding(mesh, jax.P('data'))
    results = []
    for shard in (lambda x: x, lambda x: jax.device_put(x, sharding)):
      model = Quadratic(4 * num_devices)
      model.w.set_value(shard(model.w[...]))
      before = model.w.sharding
      optimizer = nnx.optimizers.LBFGS(model, wrt=nnx.Param, graph=graph)
      target = shard(jnp.linspace(0.0, 1.0, 4 * num_devices))
      results.append(minimize(quadratic, model, optimizer, target))
      self.assertTrue(results[-1].converged)
      close(model.w[...], np.linspace(0.0, 1.0, 4 * num_devices))
      self.assertEqual(model.w.sharding, before)
    self.assertEqual(results[0].num_steps, results[1].num_steps)

  def test_has_aux(self):
    loss = lambda model: (quadratic(model), {'name': 'aux', 'w': model.w[...]})
    model = Quadratic()
    optimizer = nnx.optimizers.LBFGS(model, wrt=nnx.Param)
    self.assertTrue(minimize(loss, model, optimizer, has_aux=True).converged)
    close(model.w[...], 3.0)

  def test_python_arguments_keep_their_values(self):
    def loss(model, kind, *, power):
      self.assertIsInstance(power, int)
      w = model.w[...] - 3.0
      return jnp.sum(w**power) if kind == 'sum' else jnp.mean(w**power)

    model = Quadratic()
    optimizer = nnx.optimizers.LBFGS(model, wrt=nnx.Param)
    self.assertTrue(minimize(loss, model, optimizer, 'sum', power=2).converged)
    close(model.w[...], 3.0)

  @parameterized.parameters(True, False)
  def test_captured_module(self, graph):
    """A loss with a teacher in its closure is compiled all the same."""
    x, _ = plain_optax.data()
    teacher, model = nnx.Linear(3, 2, rngs=nnx.Rngs(1)), MLP(nnx.Rngs(0))
    optimizer = nnx.optimizers.LBFGS(model, wrt=nnx.Param, graph=graph)
    loss = lambda model: jnp.mean((model(x) - teacher(x)) ** 2)
    for factor in (1.0, -1.0):  # no stale teacher in the second call
      teacher.kernel[...] = factor * teacher.kernel
      result = minimize(loss, model, optimizer, max_steps=200, gtol=1e-3)
      self.assertTrue(result.converged)
      close(result.value, loss(model), atol=1e-5)
      self.assertLess(result.value, 1e-2)

  @parameterized.parameters(True, False)
  def test_module_among_arguments(self, graph):
    def loss(model, x, y, rngs):
      noise = 0.01 * jax.random.normal(rngs.noise(), x.shape)
      return loss_fn(model, x + noise, y)

    x, y = plain_optax.data()
    model, rngs = MLP(nnx.Rngs(0)), nnx.Rngs(noise=0)
    optimizer = nnx.Optimizer(
      model, optax.adam(1e-2), wrt=nnx.Param, graph=graph
    )
    minimize(loss, model, optimizer, x, y, rngs, max_steps=6)
    self.assertEqual(rngs.noise.count[...], 6)


class TestReuse(parameterized.TestCase):
  """The gradient of the last search is used where it is the right one."""

  def count(self, make_model, make_optimizer, **kwargs):
    n = 0

    def add():
      nonlocal n
      n += 1

    def counted(model, x, y):
      jax.debug.callback(add)
      return loss_fn(model, x, y)

    x, y = plain_optax.data()
    model = make_model(nnx.Rngs(0))
    optimizer = make_optimizer(model)
    minimize(counted, model, optimizer, x, y, max_steps=5, gtol=0, **kwargs)
    jax.effects_barrier()
    return n

  @parameterized.parameters(
    lambda model: nnx.optimizers.LBFGS(model, wrt=nnx.Param),
    lambda model: nnx.Optimizer(model, optax.lbfgs(), wrt=nnx.Param),
    lambda model: nnx.Optimizer(
      model, optax.chain(optax.clip(9.0), optax.lbfgs()), wrt=nnx.Param
    ),
  )
  def test_evaluations(self, make_optimizer):
    linesearch = optax.scale_by_zoom_linesearch(
      20, initial_guess_strategy='one'
    )
    # Nothing but the trials, once the first value is known.
    reused = self.count(MLP, make_optimizer)
    # The search has not the last word, so each step evaluates anew.
    evaluated = self.count(
      MLP,
      lambda model: nnx.Optimizer(
        model,
        optax.chain(optax.lbfgs(linesearch=linesearch), optax.identity()),
        wrt=nnx.Param,
      ),
    )
    self.assertEqual(evaluated, reused + 5)

  def test_stateful_loss_is_evaluated(self):
    make = lambda model: nnx.optimizers.BacktrackingLinesearch(
      model, optax.sgd(1e-3), wrt=nnx.Param, store_grad=True
    )
    # Each step: one pass, one accepted trial and the pass of ``store_grad``.
    self.assertGreaterEqual(self.count(Noisy, make), 5 + 5)


if __name__ == '__main__':
  absltest.main()
