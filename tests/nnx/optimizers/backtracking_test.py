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
"""``nnx.optimizers.BacktrackingLinesearch``."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_optax
from absl.testing import absltest, parameterized

from flax import nnx

MODES = ((True, True), (True, False), (False, False))


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


class TestBacktrackingLinesearch(parameterized.TestCase):
  @parameterized.parameters(*MODES)
  def test_jit_traces_once(self, graph, graph_updates):
    n = 0
    model, optimizer = make(graph=graph)
    kernel = model.first.kernel
    x, y = plain_optax.data()

    @nnx.jit(graph=graph, graph_updates=graph_updates)
    def train_step(model, optimizer, x, y):
      nonlocal n
      n += 1
      loss_fn = lambda model: ((model(x) - y) ** 2).mean()
      loss, grads = nnx.value_and_grad(
        loss_fn, graph=graph, graph_updates=graph_updates
      )(model)
      optimizer.update(model, grads, value=loss, value_fn=loss_fn)
      return loss

    first = train_step(model, optimizer, x, y)
    second = train_step(model, optimizer, x, y)

    self.assertEqual(n, 1)
    self.assertIs(model.first.kernel, kernel)
    self.assertLess(second, first)
    self.assertEqual(optimizer.step[...], 2)

  @parameterized.parameters(True, False)
  def test_functional(self, graph):
    x, y = plain_optax.data()
    expected_model, expected_optimizer = make()
    model, optimizer = make(graph=graph)
    graphdef, state = nnx.split((model, optimizer), graph=graph)

    @jax.jit
    def step(state):
      model, optimizer = nnx.merge(graphdef, state)
      train_step_inner(model, optimizer, graph)
      return nnx.state((model, optimizer), graph=graph)

    def train_step_inner(model, optimizer, graph):
      loss_fn = lambda model: jnp.mean((model(x) - y) ** 2)
      loss, grads = nnx.value_and_grad(
        loss_fn, graph=graph, graph_updates=graph
      )(model)
      optimizer.update(model, grads, value=loss, value_fn=loss_fn)

    for _ in range(3):
      state = step(state)
      train_step(expected_model, expected_optimizer, x, y)
    model, optimizer = nnx.merge(graphdef, state)
    self.assertIsInstance(optimizer, nnx.optimizers.BacktrackingLinesearch)
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
      read(model), read(expected_model),
    )

  def test_equals_plain_optax(self):
    x, y = plain_optax.data()
    args = {
      'max_backtracking_steps': 7,
      'slope_rtol': 0.3,
      'decrease_factor': 0.6,
      'increase_factor': 1.7,
      'max_learning_rate': 4.0,
    }
    tx = optax.chain(
      optax.sgd(2.0), optax.scale_by_backtracking_linesearch(**args)
    )
    model, optimizer = make(tx=optax.sgd(2.0), **args)
    params = plain_optax.mlp_params(model)
    losses = [train_step(model, optimizer, x, y)[0] for _ in range(8)]

    expected, params = plain_optax.fit(
      tx, params, plain_optax.mlp_loss, 8,
      lambda value, grad: {
        'value': value,
        'grad': grad,
        'value_fn': lambda params: plain_optax.mlp_loss(params, x, y),
      },
      step_args=(x, y),
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
      plain_optax.mlp_params(model), params,
    )

  @parameterized.parameters(1e-4, 0.3)
  def test_armijo(self, slope_rtol):
    """The accepted rate satisfies the inequality, the one before did not."""
    x, y = plain_optax.data()
    model, optimizer = make(
      slope_rtol=slope_rtol, decrease_factor=0.5, max_learning_rate=20.0,
      increase_factor=50.0,
    )
    num_rejected = 0
    for _ in range(5):
      before = plain_optax.mlp_params(model)
      loss, grads = train_step(model, optimizer, x, y)
      info = optimizer.linesearch_info
      grads = {
        name: {k: v[...] for k, v in layer.items()}
        for name, layer in grads.items()
      }
      slope = -sum((g**2).sum() for g in jax.tree.leaves(grads))

      def excess(rate):
        trial = jax.tree.map(lambda p, g: p - rate * g, before, grads)
        bound = loss + slope_rtol * rate * slope
        return plain_optax.mlp_loss(trial, x, y) - bound

      rate = info.learning_rate
      self.assertLessEqual(excess(rate), 1e-6)
      self.assertEqual(info.decrease_error, 0.0)
      self.assertFalse(info.failed)
      self.assertIsNone(info.curvature_error)
      if info.num_steps > 1:
        num_rejected += 1
        self.assertGreater(excess(rate / 0.5), -1e-6)
      jax.tree.map(
        lambda p, g, q: np.testing.assert_allclose(
          q, p - rate * g, rtol=1e-4, atol=1e-6
        ),
        before, grads, plain_optax.mlp_params(model),
      )
      np.testing.assert_allclose(
        info.value, plain_optax.mlp_loss(plain_optax.mlp_params(model), x, y),
        rtol=1e-5,
      )
    self.assertGreater(num_rejected, 0)

  def test_info_before_the_first_search(self):
    _, optimizer = make()
    info = optimizer.linesearch_info
    self.assertIsInstance(info, nnx.optimizers.LinesearchInfo)
    self.assertEqual(info.num_steps, 0)
    self.assertFalse(info.failed)

  @parameterized.parameters(False, True)
  def test_store_grad(self, store_grad):
    x, y = plain_optax.data()
    model, optimizer = make(store_grad=store_grad)
    train_step(model, optimizer, x, y)
    stored = [
      v for p, v in nnx.to_flat_state(nnx.state(optimizer)) if 'grad' in p
    ]
    self.assertLen(stored, 4 if store_grad else 0)
    if store_grad:
      search = nnx.as_pure(optimizer.opt_state).inner_state[1]
      expected = jax.grad(plain_optax.mlp_loss)(
        plain_optax.mlp_params(model), x, y
      )
      for layer in expected:
        for name in expected[layer]:
          np.testing.assert_allclose(
            search.grad[layer][name], expected[layer][name], rtol=1e-4,
            atol=1e-6,
          )


class TestErrors(parameterized.TestCase):
  @parameterized.parameters(
    ({'decrease_factor': 1.0}, '`decrease_factor` must be greater than 0.0 an'),
    ({'decrease_factor': 0.0}, '`decrease_factor`.*got 0.0'),
    ({'increase_factor': -1.0}, '`increase_factor` must be greater than 0.0,'),
    ({'max_learning_rate': 0.0}, '`max_learning_rate` must be greater'),
    ({'max_backtracking_steps': -1}, '`max_backtracking_steps` must be at lea'),
    ({'tx': optax.lbfgs()}, r'contains a line search.*linesearch=None'),
  )
  def test_argument_error(self, kwargs, message):
    with self.assertRaisesRegex(ValueError, message):
      make(**kwargs)

  def test_wrt_error(self):
    model = MLP(nnx.Rngs(0))
    make_optimizer = nnx.optimizers.BacktrackingLinesearch
    with self.assertRaisesRegex(TypeError, 'BacktrackingLinesearch.*wrt=nnx'):
      make_optimizer(model)
    with self.assertRaisesRegex(ValueError, 'nothing to optimize.*BatchStat'):
      make_optimizer(model, wrt=nnx.BatchStat)

  def test_update_error(self):
    model, optimizer = make()
    grads = nnx.state(model)
    before = read(model, optimizer)
    with self.assertRaisesRegex(TypeError, 'needs value and value_fn'):
      optimizer.update(model, grads)
    with self.assertRaisesRegex(TypeError, 'needs value_fn'):
      optimizer.update(model, grads, value=1.0)
    with self.assertRaisesRegex(TypeError, 'Missing required argument `grads`'):
      optimizer.update(model)
    with self.assertRaisesRegex(TypeError, 'not consumed by `value_fn`'):
      optimizer.update(
        model, grads, value=1.0, value_fn=lambda m: m.second.bias[0], typo=1
      )
    jax.tree.map(np.testing.assert_array_equal, read(model, optimizer), before)


if __name__ == '__main__':
  absltest.main()
