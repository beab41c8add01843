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
"""``nnx.optimizers.ZoomLinesearch`` and ``nnx.optimizers.LBFGS``."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_optax
from absl.testing import absltest, parameterized

from flax import nnx

MODES = ((True, True), (True, False), (False, False))
TYPES = {
  'zoom': nnx.optimizers.ZoomLinesearch,
  'lbfgs': nnx.optimizers.LBFGS,
}
close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)


class MLP(nnx.Module):
  def __init__(self, rngs):
    self.first = nnx.Linear(3, 4, rngs=rngs)
    self.second = nnx.Linear(4, 2, rngs=rngs)

  def __call__(self, x):
    return self.second(jnp.tanh(self.first(x)))


def loss_fn(model, x, y, scale=1.0):
  return scale * jnp.mean((model(x) - y) ** 2)


@nnx.jit
def train_step(model, optimizer, x, y, scale=1.0):
  return optimizer.value_and_update(loss_fn)(model, x, y, scale)


def read(*nodes):
  return jax.tree.map(np.array, nnx.as_pure(nnx.state(nodes)))


def fit_plain(tx, params, num_steps):
  x, y = plain_optax.data()
  return plain_optax.fit(
    tx, params, plain_optax.mlp_loss, num_steps,
    lambda value, grad: {
      'value': value, 'grad': grad,
      'value_fn': lambda params: plain_optax.mlp_loss(params, x, y),
    },
    step_args=(x, y),
  )  # fmt: skip


class TestEqualsOptax(parameterized.TestCase):
  def check(self, optimizer, model, tx, num_steps=12):
    x, y = plain_optax.data()
    params = plain_optax.mlp_params(model)
    losses = [train_step(model, optimizer, x, y) for _ in range(num_steps)]
    expected, params = fit_plain(tx, params, num_steps)
    self.assertLess(expected[-1], 0.5 * expected[0])
    close(losses, expected)
    close(model.second.kernel[...], params['second']['kernel'], rtol=1e-3)

  @parameterized.product(
    kwargs=(
      {},
      {'memory_size': 3},
      {'learning_rate': 0.7, 'scale_init_precond': False},
      {'learning_rate': optax.linear_schedule(0.5, 1.0, 4)},
      {
        'linesearch': optax.scale_by_backtracking_linesearch(
          15, store_grad=True
        )
      },
    ),
    graph=(True, False),
  )
  def test_lbfgs(self, kwargs, graph):
    model = MLP(nnx.Rngs(0))
    optimizer = nnx.optimizers.LBFGS(
      model, wrt=nnx.Param, graph=graph, **kwargs
    )
    self.check(optimizer, model, optax.lbfgs(**kwargs))

  @parameterized.product(
    kwargs=(
      {},
      {'max_learning_rate': 0.3, 'tol': 1e-3, 'curv_rtol': 0.5},
      {'increase_factor': 3.0, 'slope_rtol': 0.2, 'approx_dec_rtol': None},
      {'initial_guess_strategy': 'one', 'stepsize_precision': 1e-3},
    )
  )
  def test_zoom(self, kwargs):
    model = MLP(nnx.Rngs(0))
    direction = optax.sgd(0.5)
    optimizer = nnx.optimizers.ZoomLinesearch(
      model, direction, wrt=nnx.Param, max_linesearch_steps=12, **kwargs
    )
    tx = optax.chain(
      direction, optax.scale_by_zoom_linesearch(12, **kwargs)
    )
    self.check(optimizer, model, tx)

  def test_default_arguments_are_those_of_optax(self):
    import inspect

    ours = inspect.signature(nnx.optimizers.LBFGS.__init__).parameters
    for name, parameter in inspect.signature(optax.lbfgs).parameters.items():
      if name != 'linesearch':
        self.assertEqual(ours[name].default, parameter.default, name)
    ours = inspect.signature(nnx.optimizers.ZoomLinesearch.__init__).parameters
    theirs = inspect.signature(optax.scale_by_zoom_linesearch).parameters
    for name, parameter in theirs.items():
      if parameter.default is not parameter.empty:
        self.assertEqual(ours[name].default, parameter.default, name)


class TestSearch(parameterized.TestCase):
  @parameterized.product(name=tuple(TYPES), mode=MODES)
  def test_jit_traces_once(self, name, mode):
    graph, graph_updates = mode
    n = 0
    model = MLP(nnx.Rngs(0))
    kernel = model.first.kernel
    optimizer = TYPES[name](model, wrt=nnx.Param, graph=graph)
    x, y = plain_optax.data()

    @nnx.jit(graph=graph, graph_updates=graph_updates)
    def train_step(model, optimizer, x, y):
      nonlocal n
      n += 1
      loss, grads = nnx.value_and_grad(
        loss_fn, graph=graph, graph_updates=graph_updates
      )(model, x, y)
      optimizer.update(model, grads, value=loss, value_fn=loss_fn, x=x, y=y)
      return loss

    first = train_step(model, optimizer, x, y)
    second = train_step(model, optimizer, x, y)

    self.assertEqual(n, 1)
    self.assertIs(model.first.kernel, kernel)
    self.assertLess(second, first)
    self.assertIsInstance(optimizer, nnx.Optimizer)

  @parameterized.parameters(*TYPES)
  def test_wolfe_conditions(self, name):
    """Both conditions, recomputed from the model before and after."""
    x, y = plain_optax.data()
    model = MLP(nnx.Rngs(0))
    optimizer = TYPES[name](model, wrt=nnx.Param)
    for _ in range(6):
      old = plain_optax.mlp_params(model)
      value, grads = jax.value_and_grad(plain_optax.mlp_loss)(old, x, y)
      train_step(model, optimizer, x, y)
      new = plain_optax.mlp_params(model)
      new_value, new_grads = jax.value_and_grad(plain_optax.mlp_loss)(new, x, y)
      info = optimizer.linesearch_info

      update = optax.tree.sub(new, old)  # learning_rate * direction
      rate = float(info.learning_rate)
      slope = float(optax.tree.vdot(update, grads)) / rate
      new_slope = float(optax.tree.vdot(update, new_grads)) / rate
      self.assertLess(slope, 0.0)
      self.assertLessEqual(new_value, value + 1e-4 * rate * slope + 1e-6)
      self.assertLessEqual(abs(new_slope), 0.9 * abs(slope) + 1e-5)
      close(info.value, new_value)
      self.assertFalse(info.failed)
      self.assertGreaterEqual(info.num_steps, 1)
      self.assertLessEqual(info.decrease_error, 0.0)
      self.assertLessEqual(info.curvature_error, 1e-6)

  @parameterized.product(name=tuple(TYPES), scale=(jnp.nan, jnp.inf))
  def test_recovers(self, name, scale):
    x, y = plain_optax.data()
    model = MLP(nnx.Rngs(0))
    optimizer = TYPES[name](model, wrt=nnx.Param)
    for _ in range(2):
      train_step(model, optimizer, x, y)
    before = read(model, optimizer.opt_state.inner_state[0])
    train_step(model, optimizer, x, y, scale)

    info = optimizer.linesearch_info
    self.assertTrue(info.failed)
    self.assertEqual(info.learning_rate, 0.0)
    jax.tree.map(
      np.testing.assert_array_equal,
      read(model, optimizer.opt_state.inner_state[0]), before,
    )  # fmt: skip
    first = train_step(model, optimizer, x, y)
    self.assertFalse(optimizer.linesearch_info.failed)
    self.assertLess(train_step(model, optimizer, x, y), first)

  def test_plain_lbfgs_does_not_recover(self):
    """The fault that the type mends; if it is gone, so may be the mending."""
    x, y = plain_optax.data()
    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.lbfgs(), wrt=nnx.Param)
    train_step(model, optimizer, x, y, jnp.nan)
    for _ in range(2):
      train_step(model, optimizer, x, y)
    self.assertFalse(np.isfinite(train_step(model, optimizer, x, y)))

  def test_direction_of_ascent(self):
    x, y = plain_optax.data()
    model = MLP(nnx.Rngs(0))
    optimizer = nnx.optimizers.ZoomLinesearch(
      model, optax.scale(1.0), wrt=nnx.Param, max_linesearch_steps=5
    )
    before = read(model)
    for _ in range(2):
      train_step(model, optimizer, x, y)
      self.assertTrue(optimizer.linesearch_info.failed)
      jax.tree.map(np.testing.assert_array_equal, read(model), before)

  @parameterized.parameters(*TYPES)
  def test_before_the_first_search(self, name):
    model = MLP(nnx.Rngs(0))
    info = TYPES[name](model, wrt=nnx.Param).linesearch_info
    self.assertIsInstance(info, nnx.optimizers.LinesearchInfo)
    self.assertEqual(info.num_steps, 0)
    self.assertFalse(info.failed)
    self.assertFalse(np.isfinite(info.decrease_error))

  @parameterized.parameters(*TYPES)
  def test_split_and_merge(self, name):
    x, y = plain_optax.data()
    model = MLP(nnx.Rngs(0))
    optimizer = TYPES[name](model, wrt=nnx.Param)
    train_step(model, optimizer, x, y)
    twin, other = nnx.merge(*nnx.split((model, optimizer)), copy=True)
    self.assertIs(type(other), TYPES[name])
    close(
      train_step(model, optimizer, x, y), train_step(twin, other, x, y)
    )


class TestErrors(parameterized.TestCase):
  @parameterized.parameters(
    ('zoom', {'max_linesearch_steps': 0}, 'max_linesearch_steps.*at least 1'),
    ('zoom', {'increase_factor': 1.0}, 'increase_factor.*greater than 1'),
    ('zoom', {'max_learning_rate': -1.0}, 'max_learning_rate.*greater than 0'),
    ('zoom', {'initial_guess_strategy': 'two'}, "'keep' or 'one', got 'two'"),
    ('zoom', {'tx': optax.lbfgs()}, 'contains a line search already'),
    ('lbfgs', {'memory_size': 0}, 'memory_size.*at least 1'),
    ('lbfgs', {'linesearch': None}, 'must be a line search'),
    ('lbfgs', {'linesearch': optax.sgd(1.0)}, 'must be a line search'),
    ('lbfgs', {'wrt': nnx.BatchStat}, 'selects no Variable'),
    ('zoom', {'wrt': nnx.BatchStat}, 'selects no Variable'),
  )
  def test_argument_error(self, name, kwargs, message):
    with self.assertRaisesRegex(ValueError, message):
      TYPES[name](MLP(nnx.Rngs(0)), **{'wrt': nnx.Param, **kwargs})

  @parameterized.parameters(*TYPES)
  def test_missing_error(self, name):
    model = MLP(nnx.Rngs(0))
    with self.assertRaisesRegex(TypeError, 'wrt'):
      TYPES[name](model)
    optimizer = TYPES[name](model, wrt=nnx.Param)
    x, y = plain_optax.data()
    grads = nnx.grad(loss_fn)(model, x, y)
    before = read(model, optimizer)
    with self.assertRaisesRegex(TypeError, 'value and value_fn'):
      optimizer.update(model, grads)
    jax.tree.map(np.testing.assert_array_equal, read(model, optimizer), before)


if __name__ == '__main__':
  absltest.main()
