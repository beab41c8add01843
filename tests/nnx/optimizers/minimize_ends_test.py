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
"""How ``nnx.optimizers.minimize`` ends: limits, errors, progress, Ctrl-C."""

import contextlib
import functools
import io
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized

from flax import nnx

close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
minimize = nnx.optimizers.minimize


class Quadratic(nnx.Module):
  def __init__(self, size=4):
    self.w = nnx.Param(jnp.zeros(size))
    self.calls = nnx.Variable(jnp.array(0))


def quadratic(model, target=3.0):
  return 0.5 * jnp.sum((model.w[...] - target) ** 2)


def make(tx=None, **kwargs):
  model = Quadratic()
  if tx is None:
    return model, nnx.optimizers.LBFGS(model, wrt=nnx.Param, **kwargs)
  return model, nnx.Optimizer(model, tx, wrt=nnx.Param, **kwargs)


def read(*nodes):
  return jax.tree.map(np.array, nnx.as_pure(nnx.state(nodes)))


def printed(function, *args, **kwargs):
  """Returns the result, and what was printed."""
  text = io.StringIO()
  with contextlib.redirect_stdout(text):
    result = function(*args, **kwargs)
  return result, text.getvalue()


class TestEnds(parameterized.TestCase):
  @parameterized.product(
    tx=(None, optax.sgd(0.1), optax.lbfgs()), progress=(False, True)
  )
  def test_zero_gradient_at_the_start(self, tx, progress):
    model, optimizer = make(tx)
    before = read(model, optimizer)
    result, _ = printed(
      minimize, quadratic, model, optimizer, 0.0, progress=progress
    )
    self.assertEqual(result.num_steps, 0)
    self.assertEqual((result.value, result.grad_norm), (0.0, 0.0))
    self.assertTrue(result.converged)
    jax.tree.map(np.testing.assert_array_equal, read(model, optimizer), before)

  @parameterized.product(
    tx=(None, optax.sgd(0.1), optax.lbfgs()),
    number=(jnp.nan, jnp.inf),
    progress=(False, True),
  )
  def test_not_finite_at_the_start(self, tx, number, progress):
    model, optimizer = make(tx)
    before = read(model, optimizer)
    result, _ = printed(
      minimize, quadratic, model, optimizer, number, progress=progress
    )
    self.assertEqual(result.num_steps, 0)
    self.assertFalse(np.isfinite(result.value))
    self.assertFalse(result.converged)
    jax.tree.map(np.testing.assert_array_equal, read(model, optimizer), before)

  @parameterized.product(tx=(None, optax.sgd(0.1)), progress=(False, True))
  def test_no_steps(self, tx, progress):
    model, optimizer = make(tx)
    before = read(model, optimizer)
    result, _ = printed(
      minimize, quadratic, model, optimizer, max_steps=0, progress=progress
    )
    self.assertEqual(result.num_steps, 0)
    close(result.value, 0.5 * 4 * 9)
    close(result.grad_norm, 6.0)
    self.assertFalse(result.converged)
    jax.tree.map(np.testing.assert_array_equal, read(model, optimizer), before)

  def test_gtol(self):
    """It stops at the first point where the gradient is small enough."""
    model, optimizer = make(optax.sgd(0.5))
    result = minimize(quadratic, model, optimizer, gtol=1e-2)
    # The gradient norm is 6 at the start and is halved by each step.
    self.assertEqual(result.num_steps, 10)
    close(result.grad_norm, 6 / 2**10)
    self.assertTrue(result.converged)

  def test_diverges(self):
    model, optimizer = make(optax.sgd(1e3))
    result = minimize(quadratic, model, optimizer, max_steps=1000)
    self.assertLess(result.num_steps, 100)
    self.assertFalse(result.converged)

  def test_search_that_keeps_failing(self):
    model = Quadratic()
    optimizer = nnx.optimizers.BacktrackingLinesearch(
      model, optax.scale(1.0), wrt=nnx.Param  # uphill
    )
    result = minimize(quadratic, model, optimizer)
    self.assertEqual(result.num_steps, 15)
    self.assertFalse(result.converged)
    close(model.w[...], 0.0)

  def test_search_that_keeps_failing_slowly(self):
    """Chunks of single steps, as slow ones make them, count on."""

    def slow(value):
      time.sleep(0.02)
      return value

    def loss(model):
      value = quadratic(model)
      shape = jax.ShapeDtypeStruct((), value.dtype)
      constant = jax.lax.stop_gradient(value)
      return value + 0 * jax.pure_callback(slow, shape, constant)

    model = Quadratic()
    optimizer = nnx.optimizers.BacktrackingLinesearch(
      model, optax.scale(1.0), wrt=nnx.Param
    )
    result, _ = printed(
      minimize, loss, model, optimizer, max_steps=25, progress=True
    )
    self.assertEqual(result.num_steps, 15)

  def test_goes_on(self):
    """Two calls make the steps of one, also of an optimizer with momentum."""
    tx = optax.adam(0.1)
    model, optimizer = make(tx)
    twin, expected = make(tx)
    for steps in (3, 4):
      minimize(quadratic, model, optimizer, max_steps=steps)
    minimize(quadratic, twin, expected, max_steps=7)
    jax.tree.map(close, read(model, optimizer), read(twin, expected))

  def test_adam_hands_over_to_lbfgs(self):
    """Two optimizers of one model; neither holds stale values of it."""
    model = Quadratic()
    loss = lambda model: jnp.sum(jnp.cosh(model.w[...] - 2.0)) - 4.0
    adam = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    lbfgs = nnx.optimizers.LBFGS(model, wrt=nnx.Param)
    values = []
    for optimizer, steps in ((lbfgs, 1), (adam, 10), (lbfgs, 1), (adam, 1)):
      before = float(loss(model))
      result = minimize(loss, model, optimizer, max_steps=steps, gtol=0)
      values.append(float(result.value))
      close(result.value, loss(model), atol=1e-5)
      self.assertLess(values[-1], before + 1e-3)
    result = minimize(loss, model, lbfgs)
    self.assertTrue(result.converged)
    close(model.w[...], 2.0)
    self.assertEqual(adam.step[...], 11)


class TestErrors(parameterized.TestCase):
  def assert_raises(self, error, message, loss=quadratic, tx=None, **kwargs):
    model, optimizer = make(tx)
    before = read(model, optimizer)
    with self.assertRaisesRegex(error, message):
      minimize(loss, model, optimizer, **kwargs)
    jax.tree.map(np.testing.assert_array_equal, read(model, optimizer), before)

  def test_argument_error(self):
    self.assert_raises(ValueError, 'max_steps.*at least 0', max_steps=-1)
    self.assert_raises(TypeError, 'max_steps.*integer', max_steps=2.5)
    self.assert_raises(ValueError, 'gtol.*at least 0', gtol=-1.0)
    self.assert_raises(ValueError, 'gtol.*at least 0', gtol=float('nan'))
    for ones in (np.ones(2), jnp.ones(2)):
      self.assert_raises(ValueError, r'gtol.*scalar.*\(2,\)', gtol=ones)

  def test_not_an_optimizer_error(self):
    model, optimizer = make()
    for wrong in (model, optax.lbfgs()):
      with self.assertRaisesRegex(TypeError, 'needs an nnx.Optimizer'):
        minimize(quadratic, optimizer, wrong)

  def test_loss_error(self):
    self.assert_raises(
      ValueError, 'scalar.*jnp.mean', lambda model: model.w[...]
    )
    self.assert_raises(
      TypeError, 'tuple of 2', lambda model: (quadratic(model), 1)
    )

  def test_nothing_to_optimize_error(self):
    model = Quadratic()
    optimizer = nnx.Optimizer(model, optax.adam(1.0), wrt=nnx.BatchStat)
    with self.assertRaisesRegex(ValueError, 'nothing to optimize.*BatchStat'):
      minimize(quadratic, model, optimizer)

  @parameterized.parameters(True, False)
  def test_new_variable_error(self, graph):
    def loss(model):
      model.extra = nnx.Variable(jnp.zeros(()))
      return quadratic(model)

    model, optimizer = make(optax.sgd(0.1), graph=graph)
    with self.assertRaisesRegex(ValueError, r'structure.*1\.extra'):
      minimize(loss, model, optimizer)
    self.assertFalse(hasattr(model, 'extra'))

  def test_dtype_error(self):
    def loss(model):
      model.calls.set_value(model.calls[...] + 0.5)
      return quadratic(model)

    self.assert_raises(ValueError, r'1\.calls.*int32.*float32', loss)

  def test_progress_in_jit_error(self):
    model, optimizer = make()
    fit = nnx.jit(lambda m, o: minimize(quadratic, m, o, progress=True))
    with self.assertRaisesRegex(ValueError, 'progress=False'):
      fit(model, optimizer)


class TestProgress(parameterized.TestCase):
  @parameterized.parameters((None,), (optax.sgd(0.01),))
  def test_bar(self, tx):
    loss = lambda model: jnp.sum(jnp.cosh(model.w[...] - 3.0))
    model, optimizer = make(tx)
    twin, expected = make(tx)
    result, text = printed(
      minimize, loss, model, optimizer, max_steps=40, gtol=1e-4, progress=True
    )
    without = minimize(loss, twin, expected, max_steps=40, gtol=1e-4)

    self.assertEqual(result.num_steps, without.num_steps)
    self.assertEqual(optimizer.step[...], without.num_steps)
    jax.tree.map(
      functools.partial(close, atol=1e-4), read(model), read(twin)
    )
    self.assertIn(f'{int(result.num_steps)}/40', text)
    self.assertIn(f'value {float(result.value):.6g}', text)
    self.assertIn(f'gradient norm {float(result.grad_norm):.3g}', text)

  def test_state_advances_once_per_step(self):
    def loss(model):
      model.calls[...] += 1
      return quadratic(model)

    model, optimizer = make(optax.sgd(0.01))
    printed(minimize, loss, model, optimizer, max_steps=30, progress=True)
    self.assertEqual(model.calls[...], 30)

  def test_compiles_once(self):
    n = 0

    def loss(model):
      nonlocal n
      n += 1
      return quadratic(model)

    model, optimizer = make(optax.sgd(0.01))
    printed(minimize, loss, model, optimizer, max_steps=1)
    traces = n
    model, optimizer = make(optax.sgd(0.01))
    printed(minimize, loss, model, optimizer, max_steps=60, progress=True)
    self.assertEqual(n, traces)  # whatever the length of a chunk

  def test_interrupt(self):
    """Ctrl-C at any moment leaves what a whole number of steps leaves."""
    main = threading.main_thread()

    def interrupt(calls):
      if calls == 50:
        signal.pthread_kill(main.ident, signal.SIGINT)

    def loss(model):
      model.calls[...] += 1
      jax.debug.callback(interrupt, model.calls[...])
      return quadratic(model)

    tx = optax.adam(1e-3)
    model, optimizer = make(tx)
    handler = signal.getsignal(signal.SIGINT)
    with self.assertRaises(KeyboardInterrupt):
      printed(
        minimize, loss, model, optimizer, max_steps=10**6, progress=True
      )
    jax.effects_barrier()
    self.assertIs(signal.getsignal(signal.SIGINT), handler)
    steps = int(optimizer.step[...])
    self.assertGreaterEqual(steps, 49)
    self.assertEqual(model.calls[...], steps)

    twin, expected = make(tx)
    minimize(quadratic, twin, expected, max_steps=steps)
    close(model.w[...], twin.w[...])
    minimize(quadratic, model, optimizer, max_steps=5)
    minimize(quadratic, twin, expected, max_steps=5)
    jax.tree.map(close, read(optimizer), read(expected))


if __name__ == '__main__':
  absltest.main()
