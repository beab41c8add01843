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
"""Line-search steps for every kind of model and ``wrt`` filter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized

from flax import nnx

MODES = ((True, True), (True, False), (False, False))


def make_tx():
  return optax.chain(
    optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10)
  )


def fit(model, optimizer, loss_fn, *, num_steps=4, diff=None):
  """Jitted steps in graph mode; returns the losses and the trace count."""
  n = 0
  diff = 0 if diff is None else nnx.DiffState(0, diff)

  @nnx.jit
  def train_step(model, optimizer):
    nonlocal n
    n += 1
    loss, grads = nnx.value_and_grad(loss_fn, argnums=diff)(model)
    optimizer.update(model, grads, value=loss, value_fn=loss_fn)
    return loss

  losses = [train_step(model, optimizer) for _ in range(num_steps)]
  return np.array(losses), n



class TestWrt(parameterized.TestCase):
  @parameterized.named_parameters(
    ('type', nnx.Param, {'kernel', 'bias'}),
    ('tuple', (nnx.Param, nnx.BatchStat), {'kernel', 'bias', 'scale'}),
    ('path', nnx.PathContains('kernel'), {'kernel'}),
    ('function', lambda path, x: 'bias' in path, {'bias'}),
  )
  def test_only_wrt_changes(self, wrt, expected):
    class Scaled(nnx.Module):
      def __init__(self, rngs):
        self.linear = nnx.Linear(2, 3, rngs=rngs)
        self.scale = nnx.BatchStat(jnp.ones(3))

      def __call__(self, x):
        return self.linear(x) * self.scale[None]

    model = Scaled(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, make_tx(), wrt=wrt)
    before = dict(nnx.to_flat_state(nnx.as_pure(nnx.state(model))))
    x = jax.random.normal(jax.random.key(0), (4, 2))
    losses, n = fit(
      model, optimizer, lambda m: ((m(x) - 1.0) ** 2).mean(), diff=wrt
    )
    after = dict(nnx.to_flat_state(nnx.as_pure(nnx.state(model))))

    changed = {p[-1] for p in before if (before[p] != after[p]).any()}
    self.assertEqual(changed, expected)
    self.assertEqual(n, 1)
    self.assertTrue((np.diff(losses) < 0).all())

  def test_lora_with_grads_of_every_param(self):
    base = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    model = nnx.LoRA(2, 2, 3, base_module=base, rngs=nnx.Rngs(1))
    optimizer = nnx.Optimizer(model, optax.lbfgs(), wrt=nnx.LoRAParam)
    kernel, bias = jnp.copy(base.kernel[...]), jnp.copy(base.bias[...])
    x = jax.random.normal(jax.random.key(0), (4, 2))
    # ``nnx.grad`` differentiates every Param, and LoRAParam is one.
    losses, n = fit(model, optimizer, lambda m: ((m(x) - 1.0) ** 2).mean())

    self.assertEqual(n, 1)
    self.assertLess(losses[-1], losses[0])
    np.testing.assert_array_equal(base.kernel, kernel)
    np.testing.assert_array_equal(base.bias, bias)


class TestModels(parameterized.TestCase):
  def test_shared_params(self):
    class Tied(nnx.Module):
      def __init__(self, rngs):
        self.encode = nnx.Linear(3, 3, use_bias=False, rngs=rngs)
        self.decode = nnx.Linear(3, 3, use_bias=False, rngs=rngs)
        self.decode.kernel = self.encode.kernel

      def __call__(self, x):
        return self.decode(jnp.tanh(self.encode(x)))

    model = Tied(nnx.Rngs(0))
    tied = jnp.copy(model.encode.kernel[...])
    optimizer = nnx.Optimizer(model, make_tx(), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(0), (8, 3))
    losses, n = fit(model, optimizer, lambda m: ((m(x) - x) ** 2).mean())

    self.assertEqual(n, 1)
    self.assertIs(model.encode.kernel, model.decode.kernel)
    plain_loss = lambda w: ((jnp.tanh(x @ w) @ w - x) ** 2).mean()
    tx = make_tx()

    @jax.jit
    def plain_step(w, state):
      value, grad = jax.value_and_grad(plain_loss)(w)
      updates, state = tx.update(
        grad, state, w, value=value, grad=grad, value_fn=plain_loss
      )
      return optax.apply_updates(w, updates), state, value

    state = tx.init(tied)
    for loss in losses:
      tied, state, expected = plain_step(tied, state)
      np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(model.encode.kernel, tied, rtol=1e-4, atol=1e-6)

  def test_tuple_of_models(self):
    models = tuple(nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in range(2))
    optimizer = nnx.Optimizer(models, optax.lbfgs(), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(0), (4, 2))

    def loss_fn(models):
      first, second = models
      return ((second(jnp.tanh(first(x))) - 1.0) ** 2).mean()

    @nnx.jit
    def train_step(first, second, optimizer):
      models = (first, second)
      loss, grads = nnx.value_and_grad(
        lambda a, b: loss_fn((a, b)), argnums=(0, 1)
      )(*models)
      optimizer.update(models, grads, value=loss, value_fn=loss_fn)
      return loss

    losses = [train_step(*models, optimizer) for _ in range(4)]
    self.assertTrue((np.diff(losses) < 0).all())

  def test_batch_norm_and_dropout(self):
    class Net(nnx.Module):
      def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.steps = nnx.Variable(jnp.array(0))

      def __call__(self, x):
        self.steps[...] += 1
        return self.dropout(self.norm(self.linear(x)))

    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, make_tx(), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(1), (64, 3))
    before = jnp.copy(model.norm.mean[...])
    first_mean = model.linear(x).mean(0)
    _, n = fit(
      model, optimizer, lambda m: ((m(x) - 1.0) ** 2).mean(), num_steps=1
    )

    # One forward pass of statistics, one mask, whatever the search evaluated.
    self.assertEqual(n, 1)
    np.testing.assert_allclose(
      model.norm.mean, 0.9 * before + 0.1 * first_mean, rtol=1e-5, atol=1e-6
    )
    self.assertEqual(model.steps[...], 1)
    self.assertEqual(model.dropout.rngs.count[...], 1)

  @parameterized.parameters(*MODES)
  def test_refs(self, graph, graph_updates):
    class Counting(nnx.Module):
      def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs(), (2, 4)))
        self.calls = nnx.Variable(jnp.array(0))

      def __call__(self, x):
        self.calls[...] += 1
        return x @ self.w[...]

    x = jax.random.normal(jax.random.key(0), (5, 2))

    def train(ref):
      with nnx.var_defaults(ref=ref):
        model = Counting(nnx.Rngs(1))
        optimizer = nnx.Optimizer(
          model, optax.lbfgs(), wrt=nnx.Param, graph=graph
        )

      @functools.partial(
        nnx.jit, graph=graph, graph_updates=graph_updates
      )
      def train_step(model, optimizer):
        loss_fn = lambda model: ((model(x) - 1.0) ** 2).mean()
        value_and_grad = jax.value_and_grad(
          lambda w: ((x @ w - 1.0) ** 2).mean()
        )
        loss, grad = value_and_grad(model.w[...])
        optimizer.update(model, {'w': grad}, value=loss, value_fn=loss_fn)
        return loss

      losses = [train_step(model, optimizer) for _ in range(3)]
      self.assertEqual(model.calls[...], 0)
      self.assertEqual(optimizer.step[...], 3)
      self.assertEqual(model.w.ref, ref)
      return losses, model.w[...]

    losses, w = train(ref=True)
    expected_losses, expected_w = train(ref=False)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    np.testing.assert_allclose(w, expected_w, rtol=1e-5)
    self.assertLess(losses[-1], losses[0])

  def test_bare_arrays(self):
    class Bare(nnx.Module):
      def __init__(self, rngs):
        self.w = jax.random.normal(rngs(), (2, 4))
        self.calls = jnp.array(0)

    wrt = lambda path, x: path[-1] == 'w'
    model = Bare(nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (5, 2))
    optimizer = nnx.Optimizer(model, make_tx(), wrt=wrt)
    loss_fn = lambda model: ((x @ model.w - 1.0) ** 2).mean()
    plain_loss = lambda w: ((x @ w - 1.0) ** 2).mean()

    @jax.jit
    def train_step(model, optimizer):
      loss, grad = jax.value_and_grad(plain_loss)(model.w)
      optimizer.update(model, {'w': grad}, value=loss, value_fn=loss_fn)
      return model, optimizer, loss

    losses = []
    for _ in range(4):
      model, optimizer, loss = train_step(model, optimizer)
      losses.append(loss)
    self.assertTrue((np.diff(losses) < 0).all())
    self.assertEqual(model.calls, 0)

  def test_variable_that_holds_a_dict(self):
    class Nested(nnx.Module):
      def __init__(self):
        self.layers = nnx.Param({'b': jnp.ones(2), 'a': jnp.ones((2, 2))})

    model = Nested()
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    loss_fn = lambda m: sum(
      (x**2).sum() for x in m.layers.get_value().values()
    )

    losses, n = fit(model, optimizer, loss_fn)
    self.assertEqual(n, 1)
    self.assertTrue((np.diff(losses) < 0).all())
    self.assertIs(type(model.layers.get_value()), dict)

  def test_model_and_optimizer(self):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    state = nnx.ModelAndOptimizer(model, optax.lbfgs())
    x = jax.random.normal(jax.random.key(0), (4, 2))

    @nnx.jit
    def train_step(state):
      loss_fn = lambda model: ((model(x) - 1.0) ** 2).mean()
      loss, grads = nnx.value_and_grad(loss_fn)(state.model)
      state.update(grads, value=loss, value_fn=loss_fn)
      return loss

    first = train_step(state)
    self.assertLess(train_step(state), first)
    self.assertIs(state.model, model)


if __name__ == '__main__':
  absltest.main()
