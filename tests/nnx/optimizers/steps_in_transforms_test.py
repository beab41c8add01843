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
"""``value_and_update`` within the transformations of NNX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_optax
from absl.testing import absltest, parameterized

from flax import nnx

MODES = ((True, True), (True, False), (False, False))
NUM_STEPS = 4
close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
TX = optax.lbfgs()


class MLP(nnx.Module):
  def __init__(self, rngs):
    self.first = nnx.Linear(3, 4, rngs=rngs)
    self.second = nnx.Linear(4, 2, rngs=rngs)
    self.num_calls = nnx.Variable(jnp.array(0))

  def __call__(self, x):
    self.num_calls[...] += 1
    return self.second(jnp.tanh(self.first(x)))


def loss_fn(model, x, y):
  return jnp.mean((model(x) - y) ** 2)


def make(seed=0, graph=True):
  model = MLP(nnx.Rngs(seed))
  return model, nnx.Optimizer(model, TX, wrt=nnx.Param, graph=graph)


def train_step(model, optimizer, x, y):
  return optimizer.value_and_update(loss_fn)(model, x, y)


@functools.cache
def expected(seed=0):
  """Losses and first kernel after NUM_STEPS of plain JAX."""
  x, y = plain_optax.data()
  losses, params = plain_optax.fit(
    TX, plain_optax.mlp_params(make(seed)[0]), plain_optax.mlp_loss, NUM_STEPS,
    lambda value, grad: {
      'value': value, 'grad': grad,
      'value_fn': lambda params: plain_optax.mlp_loss(params, x, y),
    },
    step_args=(x, y),
  )  # fmt: skip
  return losses, params['first']['kernel']


class TestTransforms(parameterized.TestCase):
  def check(self, model, losses):
    expected_losses, kernel = expected()
    close(losses, expected_losses)
    close(model.first.kernel, kernel)
    self.assertEqual(model.num_calls[...], NUM_STEPS)

  @parameterized.parameters(*MODES)
  def test_jit(self, graph, graph_updates):
    x, y = plain_optax.data()
    model, optimizer = make(graph=graph)
    step = nnx.jit(train_step, graph=graph, graph_updates=graph_updates)
    losses = [step(model, optimizer, x, y) for _ in range(NUM_STEPS)]
    self.check(model, losses)

  @parameterized.parameters(True, False)
  def test_split_and_merge(self, graph):
    x, y = plain_optax.data()
    graphdef, state = nnx.split(make(graph=graph), graph=graph)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state):
      model, optimizer = nnx.merge(graphdef, state)
      loss = train_step(model, optimizer, x, y)
      return nnx.state((model, optimizer), graph=graph), loss

    losses = []
    for _ in range(NUM_STEPS):
      state, loss = step(state)
      losses.append(loss)
    self.check(nnx.merge(graphdef, state)[0], losses)

  def test_cached_partial(self):
    x, y = plain_optax.data()
    model, optimizer = make()
    step = nnx.cached_partial(nnx.jit(train_step), model, optimizer)
    self.check(model, [step(x, y) for _ in range(NUM_STEPS)])

  @parameterized.parameters(*MODES)
  def test_scan(self, graph, graph_updates):
    x, y = plain_optax.data()
    carry = make(graph=graph)

    @nnx.scan(
      in_axes=(nnx.Carry, 0, 0), out_axes=(nnx.Carry, 0),
      graph=graph, graph_updates=graph_updates,
    )  # fmt: skip
    def steps(carry, x, y):
      return carry, train_step(*carry, x, y)

    xs, ys = (jnp.stack([a] * NUM_STEPS) for a in (x, y))
    (model, _), losses = steps(carry, xs, ys)
    self.check(model, losses)

  @parameterized.product(mode=MODES, jit=(True, False))
  def test_vmap_ensemble(self, mode, jit):
    x, y = plain_optax.data()
    graph, graph_updates = mode
    mode = {'graph': graph, 'graph_updates': graph_updates}
    make_many = nnx.vmap(lambda seed: make(seed, graph), **mode)
    model, optimizer = make_many(jax.vmap(jax.random.key)(jnp.arange(3)))
    step = nnx.vmap(train_step, in_axes=(0, 0, None, None), **mode)
    step = nnx.jit(step, **mode) if jit else step

    losses = np.stack(
      [step(model, optimizer, x, y) for _ in range(NUM_STEPS)], axis=1
    )
    for seed in range(3):
      expected_losses, kernel = expected(seed)
      close(losses[seed], expected_losses)
      close(model.first.kernel[seed], kernel)
      self.assertEqual(model.num_calls[seed], NUM_STEPS)

  @parameterized.parameters(True, False)
  def test_grad_through_a_step(self, graph):
    """A step is differentiable with respect to its data."""
    x, y = plain_optax.data()

    def after(scale):
      model = MLP(nnx.Rngs(0))
      optimizer = nnx.Optimizer(
        model, optax.sgd(0.1), wrt=nnx.Param, graph=graph
      )
      optimizer.value_and_update(loss_fn)(model, scale * x, y)
      return loss_fn(model, x, y)

    def plain(scale):
      params = plain_optax.mlp_params(MLP(nnx.Rngs(0)))
      grads = jax.grad(plain_optax.mlp_loss)(params, scale * x, y)
      params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
      return plain_optax.mlp_loss(params, x, y)

    close(jax.grad(after)(1.5), jax.grad(plain)(1.5))


if __name__ == '__main__':
  absltest.main()
