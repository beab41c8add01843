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
"""What optax callbacks receive, may do, and return."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized
from probe import Probe, probe

from flax import nnx
from flax.nnx.training.params_function import is_callback, params_function
from flax.nnx.training.snapshot import Snapshot

MODES = ((True, True), (True, False), (False, False))


class Stateful(nnx.Module):
  def __init__(self, rngs):
    self.linear = nnx.Linear(3, 3, rngs=rngs)
    self.norm = nnx.BatchNorm(3, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.calls = nnx.Variable(jnp.array(0))
    self.rate = 0.5

  def __call__(self, x):
    self.calls[...] += 1
    return self.dropout(self.norm(self.linear(x)))


class TestWhatCallbacksReceive(parameterized.TestCase):
  @parameterized.parameters(True, False)
  def test_model_with_candidate_params(self, graph):
    model = Stateful(nnx.Rngs(0))
    model.calls[...] = 7
    seen = []
    probe(seen.append, model, graph=graph)

    for trial in seen:
      self.assertIsInstance(trial, Stateful)
      self.assertIsNot(trial, model)
      np.testing.assert_array_equal(
        trial.linear.kernel, model.linear.kernel + 1
      )
      self.assertEqual(trial.calls[...], 7)
      self.assertEqual(trial.rate, 0.5)
      np.testing.assert_array_equal(trial.norm.mean, model.norm.mean)

  def test_tuple_of_models(self):
    models = tuple(nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in range(2))
    seen = []
    probe(seen.append, models)
    first, second = seen[0]
    np.testing.assert_array_equal(first.kernel, models[0].kernel + 1)
    np.testing.assert_array_equal(second.kernel, models[1].kernel + 1)

  def test_state_of_a_functional_step(self):
    graphdef, params = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    seen = []
    probe(seen.append, params)
    trial = nnx.merge(graphdef, seen[0])
    np.testing.assert_array_equal(trial.kernel, params.kernel + 1)

  def test_model_as_it_was_when_update_was_called(self):
    @nnx.var_defaults(ref=True)
    def make():
      return Stateful(nnx.Rngs(0))

    model = make()
    calls = []

    def fn(trial):
      calls.append(trial.calls[...])
      model.calls[...] += 1  # a ref of the real model changes under way
      trial.calls[...] += 10
      return 0.0

    probe(fn, model, wrt=nnx.Param)
    self.assertEqual([int(c) for c in calls], [0, 0])

  def test_other_arguments_pass_through(self):
    def fn(model, x, scale=1.0, *, flag):
      return model(x).sum() * scale, flag

    x = jnp.ones(2)
    model = nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(0))
    (value, flag), _ = probe(fn, model, x=x, scale=2.0, flag='yes')
    np.testing.assert_allclose(
      value, 2 * (x @ (model.kernel[...] + 1)).sum(), rtol=1e-6
    )
    self.assertEqual(flag, 'yes')

  def test_signature_is_kept(self):
    def loss_fn(model, inputs, targets=None):
      """The loss."""

    wrapped = params_function(
      loss_fn, Snapshot(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), nnx.Param)
    )
    self.assertEqual(inspect.signature(wrapped), inspect.signature(loss_fn))
    self.assertEqual(wrapped.__doc__, 'The loss.')

  def test_not_shaped_like_the_params(self):
    seen = []
    probe(seen.append, candidate=lambda params: jnp.arange(3))
    np.testing.assert_array_equal(seen[0], jnp.arange(3))

  def test_is_callback(self):
    class Callable(nnx.Module):
      def __call__(self):
        return 0

    for callback in (lambda m: 0, jax.jit(abs), nnx.jit(abs), Probe().update):
      self.assertTrue(is_callback(callback))
    variable = nnx.Param(jnp.ones(()))
    for data in (Callable(), variable, jnp.ones(()), 'fn', None, int):
      self.assertFalse(is_callback(data))


class TestStateCallbacks(parameterized.TestCase):
  def test_annotation(self):
    def annotated(state: nnx.State):
      return state

    def unresolvable(state: nnx.State, x: NoSuchName = 0):  # noqa: F821
      return state

    def generic(state: nnx.State[str, jax.Array]):
      return state

    for fn in (annotated, unresolvable, generic):
      for result in probe(fn):
        self.assertIsInstance(result, nnx.State)
        self.assertIsInstance(result['kernel'], jax.Array)

  def test_split_merge_without_annotation(self):
    model = Stateful(nnx.Rngs(0))
    graphdef, _, rest = nnx.split(model, nnx.Param, ...)
    calls = []

    def fn(state):
      calls.append(type(state))
      return nnx.merge(graphdef, state, rest).linear.kernel[...]

    results = probe(fn, model)
    np.testing.assert_array_equal(results[0], model.linear.kernel + 1)
    # The model is tried once, then the choice holds for the whole update.
    self.assertEqual(calls, [Stateful, nnx.State, nnx.State])

  def test_the_error_for_the_model_is_shown_error(self):
    def fn(model):
      raise ValueError(f'wrong {type(model).__name__}')

    with self.assertRaisesRegex(ValueError, 'wrong Linear'):
      probe(fn)

  def test_annotated_state_is_not_retried_error(self):
    calls = []

    def fn(state: nnx.State):
      calls.append(type(state))
      raise ValueError('wrong')

    with self.assertRaisesRegex(ValueError, 'wrong'):
      probe(fn)
    self.assertEqual(calls, [nnx.State])


class TestCallbacksLeakNothing(parameterized.TestCase):
  @parameterized.product(mode=MODES, ref=(False, True))
  def test_mutating_loss(self, mode, ref):
    graph, graph_updates = mode

    @nnx.var_defaults(ref=ref)
    def make():
      return Stateful(nnx.Rngs(0))

    model = make()
    tx = optax.chain(
      optax.sgd(0.1), optax.scale_by_backtracking_linesearch(5, store_grad=True)
    )
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param, graph=graph)
    x = jax.random.normal(jax.random.key(0), (8, 3))
    grads = jax.tree.map(
      jnp.zeros_like, nnx.as_pure(nnx.state(model, nnx.Param, graph=graph))
    )
    read = lambda: jax.tree.map(
      jnp.copy, nnx.as_pure(nnx.state(model, graph=graph))
    )
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)

    def loss_fn(model):
      self.assertIsInstance(model, Stateful)
      loss = (model(x) ** 2).mean()
      model.extra = nnx.Intermediate(loss)
      return loss

    before = read()
    step = lambda model, optimizer: optimizer.update(
      model, grads, value=1.0, value_fn=loss_fn
    )
    step(model, optimizer)
    nnx.jit(step, graph=graph, graph_updates=graph_updates)(model, optimizer)
    after = read()

    self.assertEqual(jax.tree.structure(after), jax.tree.structure(before))
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(before)):
      a, b = (jax.random.key_data(k) if is_key(k) else k for k in (a, b))
      np.testing.assert_array_equal(a, b)

  def test_sow(self):
    class Sowing(nnx.Module):
      def __init__(self, rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)

      def __call__(self, x):
        x = self.linear(x)
        self.sow(nnx.Intermediate, 'hidden', x)
        return x

    model = Sowing(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.lbfgs(), wrt=nnx.Param)
    x = jnp.ones((1, 2))

    @nnx.jit
    def train_step(model, optimizer):
      captured = nnx.capture(
        lambda model: (model(x) ** 2).sum(), nnx.Intermediate
      )
      loss_fn = lambda model: captured(model)[0]
      loss, grads = nnx.value_and_grad(loss_fn)(model)
      optimizer.update(model, grads, value=loss, value_fn=loss_fn)
      return loss

    first = train_step(model, optimizer)
    second = train_step(model, optimizer)
    self.assertLess(second, first)
    self.assertNotIn('hidden', vars(model))


if __name__ == '__main__':
  absltest.main()
