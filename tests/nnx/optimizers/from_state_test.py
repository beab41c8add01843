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
"""``from_state``: value and gradient taken from the last line search."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_optax
from absl.testing import absltest, parameterized

from flax import nnx

close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
MODES = ((True, True), (True, False), (False, False))
WRAPPERS = {
  'alone': lambda tx: tx,
  'chain': lambda tx: optax.chain(optax.clip(10.0), tx),
  'multi_steps': lambda tx: optax.MultiSteps(tx, 2),
  'inject_hyperparams': lambda tx: optax.inject_hyperparams(
    lambda learning_rate: optax.chain(optax.scale(learning_rate), tx)
  )(learning_rate=1.0),
  'apply_if_finite': lambda tx: optax.apply_if_finite(tx, 3),
  'partition': lambda tx: optax.partition(
    {'all': tx}, lambda params: jax.tree.map(lambda _: 'all', params)
  ),
}  # fmt: skip


class MLP(nnx.Module):
  def __init__(self, rngs):
    self.first = nnx.Linear(3, 4, rngs=rngs)
    self.second = nnx.Linear(4, 2, rngs=rngs)

  def __call__(self, x):
    return self.second(jnp.tanh(self.first(x)))


class Attention(nnx.Module):
  """Has parameters called ``value`` and ``grad``."""

  def __init__(self, rngs):
    self.attend = nnx.MultiHeadAttention(
      num_heads=2, in_features=4, decode=False, rngs=rngs
    )
    self.grad = nnx.Param(jnp.ones(4))

  def __call__(self, x):
    return self.attend(x) * self.grad[None, None]


class Counter:
  """A loss that counts how often it is evaluated when it runs."""

  def __init__(self):
    self.n = 0

  def count(self):
    self.n += 1

  def loss(self, model, x, y):
    jax.debug.callback(self.count)
    return jnp.mean((model(x) - y) ** 2)

  def take(self):
    jax.effects_barrier()
    n, self.n = self.n, 0
    return n


def loss_fn(model, x, y):
  return jnp.mean((model(x) - y) ** 2)


def losses_of(tx, from_state, *, num_steps=5, mode=(True, True), jit=True,
              make=MLP, data=None):  # fmt: skip
  graph, graph_updates = mode
  x, y = data or plain_optax.data()
  model = make(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param, graph=graph)
  step = lambda model, optimizer: optimizer.value_and_update(
    loss_fn, from_state=from_state
  )(model, x, y)
  if jit:
    step = nnx.jit(step, graph=graph, graph_updates=graph_updates)
  return np.array([step(model, optimizer) for _ in range(num_steps)])


class TestFromState(parameterized.TestCase):
  @parameterized.product(mode=MODES, jit=(True, False))
  def test_same_trajectory(self, mode, jit):
    expected = losses_of(optax.lbfgs(), False, mode=mode, jit=jit)
    found = losses_of(optax.lbfgs(), True, mode=mode, jit=jit)

    self.assertLess(expected[-1], expected[0])
    close(found, expected)

  @parameterized.parameters(
    (optax.scale_by_zoom_linesearch(15, initial_guess_strategy='one'),),
    (optax.scale_by_backtracking_linesearch(15, store_grad=True),),
  )
  def test_other_searches(self, linesearch):
    tx = optax.chain(optax.sgd(1.0), linesearch)
    close(losses_of(tx, True), losses_of(tx, False))

  @parameterized.parameters(*WRAPPERS)
  def test_wrappers(self, name):
    tx = WRAPPERS[name](optax.lbfgs())
    expected = losses_of(tx, False)
    self.assertLess(expected[-1], expected[0])
    close(losses_of(tx, True), expected)

  def test_evaluations_fall_from_two_to_one(self):
    x, y = plain_optax.data()

    def count(from_state):
      counter = Counter()
      model = MLP(nnx.Rngs(0))
      optimizer = nnx.Optimizer(model, optax.lbfgs(), wrt=nnx.Param)
      step = nnx.jit(
        lambda model, optimizer: optimizer.value_and_update(
          counter.loss, from_state=from_state
        )(model, x, y)
      )
      numbers = []
      for _ in range(6):
        step(model, optimizer)
        trials = optax.tree.get(optimizer.opt_state, 'num_linesearch_steps')
        numbers.append((counter.take(), int(trials[...])))
      return numbers

    plain, reused = count(False), count(True)
    for n, trials in plain:
      self.assertEqual(n, trials + 1)
    self.assertEqual(reused[0], plain[0])  # nothing is stored yet
    for n, trials in reused[1:]:
      self.assertEqual(n, trials)
    # Where the first trial is accepted: two evaluations, and one.
    self.assertEqual(plain[-1], (2, 1))
    self.assertEqual(reused[-1], (1, 1))

  @parameterized.parameters(True, False)
  def test_traced(self, graph):
    """One compiled step for the old data and for new data."""
    n = 0
    x, y = plain_optax.data()
    model, twin = MLP(nnx.Rngs(0)), MLP(nnx.Rngs(0))
    tx = optax.lbfgs()
    optimizer, expected = (
      nnx.Optimizer(m, tx, wrt=nnx.Param, graph=graph) for m in (model, twin)
    )

    @nnx.jit(graph=graph, graph_updates=graph)
    def step(model, optimizer, x, y, same):
      nonlocal n
      n += 1
      return optimizer.value_and_update(loss_fn, from_state=same)(model, x, y)

    for number in range(6):
      scale = 1.0 if number < 3 else 2.0
      same = jnp.array(number not in (0, 3))
      loss = step(model, optimizer, scale * x, y, same)
      other = step(twin, expected, scale * x, y, jnp.array(False))
      close(loss, other)
    self.assertEqual(n, 1)

  def test_stale_state_is_reused(self):
    """What ``from_state`` promises: it does not look at the data."""
    x, y = plain_optax.data()
    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.lbfgs(), wrt=nnx.Param)
    evaluate = optimizer.value_and_grad(loss_fn, from_state=True)
    optimizer.value_and_update(loss_fn)(model, x, y)
    loss, grads = evaluate(model, x, y)
    expected, expected_grads = nnx.value_and_grad(loss_fn)(model, x, y)
    close(loss, expected)
    jax.tree.map(close, nnx.as_pure(grads), nnx.as_pure(expected_grads))

    stale, _ = evaluate(model, 2 * x, y)
    close(stale, expected)
    self.assertNotAlmostEqual(float(loss_fn(model, 2 * x, y)), float(expected))

  @parameterized.parameters(True, False)
  def test_parameters_named_value_and_grad(self, graph):
    x = np.random.default_rng(0).normal(size=(3, 5, 4)).astype(np.float32)
    data = (x, np.ones_like(x))

    expected, found = (
      losses_of(
        optax.lbfgs(), from_state, mode=(graph, graph), make=Attention,
        data=data,
      )
      for from_state in (False, True)
    )  # fmt: skip
    close(found, expected)

  def test_bool_of_numpy(self):
    close(
      losses_of(optax.lbfgs(), np.bool_(True)),
      losses_of(optax.lbfgs(), np.bool_(False)),
    )


class TestErrors(parameterized.TestCase):
  @parameterized.product(
    case=(
      (optax.adam(1e-3), 'has no line search.*from_state=False'),
      (
        optax.chain(optax.lbfgs(), optax.scale_by_zoom_linesearch(3)),
        'has 2 line searches',
      ),
      (
        optax.chain(
          optax.sgd(1.0), optax.scale_by_backtracking_linesearch(3)
        ),
        'store_grad=False.*store_grad=True',
      ),
    ),
    traced=(True, False),
    jit=(True, False),
  )
  def test_nothing_to_reuse_error(self, case, traced, jit):
    tx, message = case
    with self.assertRaisesRegex(ValueError, message):
      losses_of(tx, jnp.array(True) if traced else True, jit=jit)

  @parameterized.parameters(True, False)
  def test_stateful_loss_error(self, graph):
    class Stateful(nnx.Module):
      def __init__(self, rngs):
        self.linear = nnx.Linear(3, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

      def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))

    x, y = plain_optax.data()
    model = Stateful(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.lbfgs(), wrt=nnx.Param, graph=graph)
    state = nnx.state((model, optimizer), nnx.Not(nnx.RngKey))
    before = jax.tree.map(np.array, nnx.as_pure(state))
    step = optimizer.value_and_update(loss_fn, from_state=True)
    names = r'dropout\.rngs\.count, norm\.mean, norm\.var.*model\.eval'
    with self.assertRaisesRegex(ValueError, names):
      step(model, x, y)

    state = nnx.state((model, optimizer), nnx.Not(nnx.RngKey))
    jax.tree.map(np.testing.assert_array_equal, nnx.as_pure(state), before)
    model.eval()
    self.assertLess(float(step(model, x, y)), 10.0)  # now it may be skipped

  def test_stateful_argument_error(self):
    rngs = nnx.Rngs(0)
    x, y = plain_optax.data()
    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.lbfgs(), wrt=nnx.Param)
    loss = lambda model, x, y, rngs: loss_fn(model, x, y + rngs.uniform())
    with self.assertRaisesRegex(ValueError, 'an argument of the loss'):
      optimizer.value_and_update(loss, from_state=True)(model, x, y, rngs)
    self.assertEqual(rngs.default.count[...], 0)

  def test_aux_error(self):
    loss = lambda model, x, y: (loss_fn(model, x, y), 1.0)
    x, y = plain_optax.data()
    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.lbfgs(), wrt=nnx.Param)
    with self.assertRaisesRegex(ValueError, 'aux.*has_aux=False'):
      optimizer.value_and_update(loss, has_aux=True, from_state=True)(
        model, x, y
      )

  def test_partial_search_error(self):
    """A search over some parameters stores no gradient of the others."""
    labels = lambda params: jax.tree.map_with_path(
      lambda path, _: 'adam' if 'second' in str(path) else 'lbfgs', params
    )
    tx = optax.partition(
      {'lbfgs': optax.lbfgs(), 'adam': optax.adam(1e-3)}, labels
    )
    with self.assertRaisesRegex(ValueError, 'only some of the parameters'):
      losses_of(tx, True)


if __name__ == '__main__':
  absltest.main()
