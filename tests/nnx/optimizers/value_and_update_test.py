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
"""``Optimizer.value_and_grad`` and ``Optimizer.value_and_update``."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_optax
from absl.testing import absltest, parameterized

from flax import nnx

MODES = ((True, True), (True, False), (False, False))
close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6)


class MLP(nnx.Module):
  def __init__(self, rngs):
    self.first = nnx.Linear(3, 4, rngs=rngs)
    self.second = nnx.Linear(4, 2, rngs=rngs)

  def __call__(self, x):
    return self.second(jnp.tanh(self.first(x)))


class Counting(nnx.Module):
  """Counts its calls, with an integer Variable and one of its own kind."""

  def __init__(self, rngs):
    self.linear = nnx.Linear(3, 2, rngs=rngs)
    self.num_calls = nnx.Variable(jnp.array(0))
    self.mean = nnx.BatchStat(jnp.zeros(3))

  def __call__(self, x):
    self.num_calls[...] += 1
    self.mean[...] = 0.5 * self.mean + 0.5 * x.mean(0)
    return self.linear(x)


def loss_fn(model, x, y):
  return jnp.mean((model(x) - y) ** 2)


def read(*nodes):
  return jax.tree.map(np.array, nnx.as_pure(nnx.state(nodes)))


class TestValueAndUpdate(parameterized.TestCase):
  @parameterized.parameters(*MODES)
  def test_jit_traces_once(self, graph, graph_updates):
    n = 0
    model = MLP(nnx.Rngs(0))
    kernel = model.first.kernel
    optimizer = nnx.Optimizer(model, optax.lbfgs(), wrt=nnx.Param, graph=graph)
    x, y = plain_optax.data()

    @nnx.jit(graph=graph, graph_updates=graph_updates)
    def train_step(model, optimizer, x, y):
      nonlocal n
      n += 1
      return optimizer.value_and_update(loss_fn)(model, x, y)

    first = train_step(model, optimizer, x, y)
    second = train_step(model, optimizer, x, y)

    self.assertEqual(n, 1)
    self.assertIs(model.first.kernel, kernel)
    self.assertLess(second, first)
    self.assertEqual(optimizer.step[...], 2)

  @parameterized.product(
    tx=(
      optax.adam(1e-2),
      optax.lbfgs(),
      optax.polyak_sgd(),
      optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10)
      ),
      optax.MultiSteps(optax.lbfgs(), 2).gradient_transformation(),
    ),
    graph=(True, False),
  )
  def test_equals_plain_optax(self, tx, graph):
    x, y = plain_optax.data()
    model = MLP(nnx.Rngs(0))
    params = plain_optax.mlp_params(model)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param, graph=graph)

    @nnx.jit(graph=graph, graph_updates=graph)
    def train_step(model, optimizer):
      return optimizer.value_and_update(loss_fn)(model, x, y=y)

    losses = [train_step(model, optimizer) for _ in range(5)]

    expected, params = plain_optax.fit(
      tx, params, plain_optax.mlp_loss, 5,
      lambda value, grad: {
        'value': value, 'grad': grad,
        'value_fn': lambda params: plain_optax.mlp_loss(params, x, y),
      },
      step_args=(x, y),
    )  # fmt: skip
    close(losses, expected)
    close(model.first.kernel[...], params['first']['kernel'])

  @parameterized.parameters(True, False)
  def test_aux(self, graph):
    x, y = plain_optax.data()
    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.lbfgs(), wrt=nnx.Param, graph=graph)

    def with_aux(model, x, y):
      out = model(x)
      return jnp.mean((out - y) ** 2), {'out': out, 'name': 'mlp'}

    expected = model(x)
    loss, aux = optimizer.value_and_update(with_aux, has_aux=True)(model, x, y)

    close(loss, jnp.mean((expected - y) ** 2))
    close(aux['out'], expected)
    self.assertEqual(aux['name'], 'mlp')
    self.assertFalse(np.allclose(model(x), expected))

  @parameterized.product(
    tx=(optax.sgd(0.1), optax.lbfgs()), mode=MODES, jit=(True, False)
  )
  def test_state_advances_once_per_step(self, tx, mode, jit):
    graph, graph_updates = mode
    x, y = plain_optax.data()
    model = Counting(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param, graph=graph)
    train_step = lambda model, optimizer: optimizer.value_and_update(loss_fn)(
      model, x, y
    )
    if jit:
      train_step = nnx.jit(train_step, graph=graph, graph_updates=graph_updates)

    for _ in range(3):
      train_step(model, optimizer)

    self.assertEqual(model.num_calls[...], 3)
    close(model.mean, (1 - 0.5**3) * x.mean(0))

  def test_wrt_path_in_tree_mode(self):
    """nnx.value_and_grad differentiates every Variable there, integers too."""
    x, y = plain_optax.data()
    model = Counting(nnx.Rngs(0))
    kernel = np.array(model.linear.kernel)
    optimizer = nnx.Optimizer(
      model, optax.lbfgs(), wrt=nnx.PathContains('bias'), graph=False
    )
    (loss, grads) = optimizer.value_and_grad(loss_fn)(model, x, y)
    expected = jax.grad(
      lambda bias: jnp.mean((x @ kernel + bias[None] - y) ** 2)
    )(jnp.zeros(2))

    close(grads['linear']['bias'][...], expected)
    self.assertEqual(list(grads['linear']), ['bias'])
    self.assertEqual(model.num_calls[...], 1)

    after = optimizer.value_and_update(loss_fn)(model, x, y)
    close(loss, after)
    np.testing.assert_array_equal(model.linear.kernel, kernel)
    self.assertFalse(np.allclose(model.linear.bias, 0.0))

  @parameterized.parameters(True, False)
  def test_modules_among_arguments(self, graph):
    """An rng stream of the loss is advanced once, and the same in a search."""
    x, y = plain_optax.data()
    model = MLP(nnx.Rngs(0))
    rngs, twin = nnx.Rngs(noise=7), nnx.Rngs(noise=7)
    optimizer = nnx.Optimizer(model, optax.lbfgs(), wrt=nnx.Param, graph=graph)

    def noisy(model, x, y, rngs):
      noise = jax.random.normal(rngs.noise(), x.shape)
      return loss_fn(model, x + noise, y)

    for count in (1, 2):
      expected = noisy(model, x, y, twin)
      close(optimizer.value_and_update(noisy)(model, x, y, rngs), expected)
      self.assertEqual(rngs.noise.count[...], count)

  def test_value_and_grad_then_update(self):
    x, y = plain_optax.data()
    model, twin = MLP(nnx.Rngs(0)), MLP(nnx.Rngs(0))
    optimizer, expected = (
      nnx.Optimizer(m, optax.adam(0.1), wrt=nnx.Param) for m in (model, twin)
    )
    loss, grads = optimizer.value_and_grad(loss_fn)(model, x, y)
    optimizer.update(model, grads)
    expected_loss, expected_grads = nnx.value_and_grad(loss_fn)(twin, x, y)
    expected.update(twin, expected_grads)

    close(loss, expected_loss)
    self.assertEqual(
      jax.tree.structure(grads), jax.tree.structure(expected_grads)
    )
    jax.tree.map(close, read(model, optimizer), read(twin, expected))


class TestSubclasses(parameterized.TestCase):
  def test_strict_update(self):
    class Halving(nnx.Optimizer):
      def update(self, model, grads):
        super().update(model, jax.tree.map(lambda g: g / 2, grads))

    x, y = plain_optax.data()
    model, twin = MLP(nnx.Rngs(0)), MLP(nnx.Rngs(0))
    Halving(model, optax.sgd(0.2), wrt=nnx.Param).value_and_update(loss_fn)(
      model, x, y
    )
    nnx.Optimizer(twin, optax.sgd(0.1), wrt=nnx.Param).update(
      twin, nnx.grad(loss_fn)(twin, x, y)
    )
    jax.tree.map(close, read(model), read(twin))

  @parameterized.parameters(True, False)
  def test_extra_args(self, jit):
    class Doubled(nnx.Optimizer):
      def extra_args(self, model, grads, kwargs):
        kwargs = {**kwargs, 'value': 2 * kwargs['value']}
        return super().extra_args(model, grads, kwargs)

    x, y = plain_optax.data()
    model = MLP(nnx.Rngs(0))
    params = plain_optax.mlp_params(model)
    optimizer = Doubled(model, optax.polyak_sgd(1e6), wrt=nnx.Param)
    step = lambda model, optimizer: optimizer.value_and_update(loss_fn)(
      model, x, y
    )
    (nnx.jit(step) if jit else step)(model, optimizer)

    # Polyak's step is value / |grad|^2 along the gradient.
    value, grads = jax.value_and_grad(plain_optax.mlp_loss)(params, x, y)
    scale = 2 * value / optax.tree.norm(grads, squared=True)
    close(
      model.first.kernel[...],
      params['first']['kernel'] - scale * grads['first']['kernel'],
    )

  def test_sam(self):
    """``grad_fn`` is supplied, and evaluated at other parameters."""
    x, y = plain_optax.data()
    tx = optax.contrib.sam(
      optax.sgd(0.1), optax.contrib.normalize(), sync_period=2, opaque_mode=True
    )
    model = MLP(nnx.Rngs(0))
    params = plain_optax.mlp_params(model)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    losses = [
      optimizer.value_and_update(loss_fn)(model, x, y) for _ in range(3)
    ]
    expected, _ = plain_optax.fit(
      tx, params, plain_optax.mlp_loss, 3,
      lambda value, grad: {
        'grad_fn': lambda p, _: jax.grad(plain_optax.mlp_loss)(p, x, y)
      },
      step_args=(x, y),
    )  # fmt: skip
    close(losses, expected)


class TestErrors(parameterized.TestCase):
  def assert_unchanged_by(self, error, message, loss_fn, **kwargs):
    x, y = plain_optax.data()
    for graph in (True, False):
      model = Counting(nnx.Rngs(0))
      optimizer = nnx.Optimizer(
        model, optax.lbfgs(), wrt=nnx.Param, graph=graph
      )
      before = read(model, optimizer)
      for method in ('value_and_update', 'value_and_grad'):
        with self.assertRaisesRegex(error, message):
          getattr(optimizer, method)(loss_fn, **kwargs)(model, x, y)
        jax.tree.map(
          np.testing.assert_array_equal, read(model, optimizer), before
        )

  def test_loss_error(self):
    self.assert_unchanged_by(
      ValueError, r'loss_fn.*shape \(16, 2\).*jnp.mean',
      lambda model, x, y: (model(x) - y) ** 2,
    )  # fmt: skip
    self.assert_unchanged_by(
      TypeError, 'returned a tuple of 2',
      lambda model, x, y: (loss_fn(model, x, y), 1.0),
    )  # fmt: skip
    self.assert_unchanged_by(
      TypeError, 'dtype int32',
      lambda model, x, y: model(x).sum().astype(jnp.int32),
    )  # fmt: skip
    self.assert_unchanged_by(
      TypeError, r'pair \(loss, aux\)', loss_fn, has_aux=True
    )

  def test_error_in_the_loss(self):
    def typo(model, x, y):
      return model(x).mena()

    self.assert_unchanged_by(AttributeError, 'mena', typo)

  def test_from_state_type_error(self):
    self.assert_unchanged_by(
      TypeError, 'from_state must be a bool', loss_fn, from_state='yes'
    )
    self.assert_unchanged_by(
      ValueError, r'scalar.*\(2,\)', loss_fn,
      from_state=jnp.array([True, False]),
    )  # fmt: skip


if __name__ == '__main__':
  absltest.main()
