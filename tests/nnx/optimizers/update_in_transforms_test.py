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
"""One line-search step, eagerly and under every transformation of NNX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_optax
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P

from flax import nnx

MODES = ((True, True), (True, False), (False, False))
NUM_STEPS = 3


class MLP(nnx.Module):
  def __init__(self, rngs):
    self.first = nnx.Linear(3, 4, rngs=rngs)
    self.second = nnx.Linear(4, 2, rngs=rngs)
    self.calls = nnx.Variable(jnp.array(0))

  def __call__(self, x):
    self.calls[...] += 1
    return self.second(jnp.tanh(self.first(x)))


def make_tx():
  return optax.chain(
    optax.sgd(1.0),
    optax.scale_by_backtracking_linesearch(max_backtracking_steps=10),
  )


def make(seed=0, graph=None):
  model = MLP(nnx.Rngs(seed))
  return model, nnx.Optimizer(model, make_tx(), wrt=nnx.Param, graph=graph)


def value_and_grad_of_params(loss_fn, graph):
  """Without graph updates NNX differentiates the counter, too."""

  def wrapper(model):
    graphdef, params, rest = nnx.split(model, nnx.Param, ..., graph=graph)

    def of_params(params):
      model = nnx.merge(graphdef, params, rest, copy=True)
      return loss_fn(model), nnx.state(model, nnx.Not(nnx.Param), graph=graph)

    (loss, rest), grads = jax.value_and_grad(of_params, has_aux=True)(
      nnx.as_pure(params)
    )
    nnx.update(model, rest)
    return loss, grads

  return wrapper


def train_step(
  model, optimizer, x, y, graph=True, graph_updates=True, reduce=lambda x: x
):
  loss_fn = lambda model: reduce(jnp.mean((model(x) - y) ** 2))
  if graph_updates:
    value_and_grad = nnx.value_and_grad(loss_fn)
  else:
    value_and_grad = value_and_grad_of_params(loss_fn, graph)
  loss, grads = value_and_grad(model)
  optimizer.update(model, grads, value=loss, value_fn=loss_fn)
  return loss


def expected(seed=0, num_steps=NUM_STEPS, data_seed=0):
  return plain_optax.fit(
    make_tx(),
    plain_optax.mlp_params(MLP(nnx.Rngs(seed))),
    plain_optax.mlp_loss,
    num_steps,
    lambda value, grad: {
      'value': value,
      'grad': grad,
      'value_fn': lambda params: plain_optax.mlp_loss(
        params, *plain_optax.data(seed=data_seed)
      ),
    },
    step_args=plain_optax.data(seed=data_seed),
  )


class TestTransforms(parameterized.TestCase):
  def check(self, model, losses, num_calls=NUM_STEPS):
    expected_losses, params = expected()
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
      plain_optax.mlp_params(model),
      params,
    )
    # Forward passes count, trials of the search do not.
    self.assertEqual(model.calls[...], num_calls)

  @parameterized.parameters(True, False)
  def test_eager(self, graph):
    x, y = plain_optax.data()
    model, optimizer = make(graph=graph)
    losses = [
      train_step(model, optimizer, x, y, graph, graph) for _ in range(NUM_STEPS)
    ]
    self.check(model, losses)

  @parameterized.parameters(*MODES)
  def test_nnx_jit(self, graph, graph_updates):
    x, y = plain_optax.data()
    model, optimizer = make(graph=graph)
    kernel = model.first.kernel
    step = nnx.jit(
      functools.partial(train_step, graph=graph, graph_updates=graph_updates),
      graph=graph, graph_updates=graph_updates,
    )
    losses = [step(model, optimizer, x, y) for _ in range(NUM_STEPS)]
    self.check(model, losses)
    self.assertIs(model.first.kernel, kernel)

  @parameterized.parameters(True, False)
  def test_jax_jit_functional(self, graph):
    x, y = plain_optax.data()
    n = 0
    graphdef, state = nnx.split(make(graph=graph), graph=graph)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, x, y):
      nonlocal n
      n += 1
      model, optimizer = nnx.merge(graphdef, state)
      loss = train_step(model, optimizer, x, y, graph, graph)
      return loss, nnx.state((model, optimizer), graph=graph)

    losses = []
    for _ in range(NUM_STEPS):
      loss, state = step(state, x, y)
      losses.append(loss)
    self.assertEqual(n, 1)
    self.check(nnx.merge(graphdef, state)[0], losses)

  def test_cached_partial(self):
    x, y = plain_optax.data()
    model, optimizer = make()
    step = nnx.cached_partial(nnx.jit(train_step), model, optimizer)
    losses = [step(x, y) for _ in range(NUM_STEPS)]
    self.check(model, losses)

  @parameterized.parameters(*MODES)
  def test_scan(self, graph, graph_updates):
    x, y = plain_optax.data()
    carry = make(graph=graph)

    @nnx.scan(
      in_axes=(nnx.Carry, 0, 0), out_axes=(nnx.Carry, 0),
      graph=graph, graph_updates=graph_updates,
    )
    def steps(carry, x, y):
      loss = train_step(*carry, x, y, graph, graph_updates)
      return carry, loss

    xs, ys = (jnp.stack([a] * NUM_STEPS) for a in (x, y))
    (model, _), losses = steps(carry, xs, ys)
    self.check(model, losses)

  @parameterized.parameters(*MODES)
  def test_fori_loop(self, graph, graph_updates):
    x, y = plain_optax.data()

    def body(i, carry):
      model, optimizer, losses = carry
      loss = train_step(model, optimizer, x, y, graph, graph_updates)
      return model, optimizer, losses.at[i].set(loss)

    model, optimizer, losses = nnx.fori_loop(
      0, NUM_STEPS, body, (*make(graph=graph), jnp.zeros(NUM_STEPS)),
      graph=graph, graph_updates=graph_updates,
    )
    self.check(model, losses)
    self.assertEqual(optimizer.step[...], NUM_STEPS)

  @parameterized.parameters(*MODES)
  def test_vmap_ensemble(self, graph, graph_updates):
    x, y = plain_optax.data()
    mode = {'graph': graph, 'graph_updates': graph_updates}
    make_many = nnx.vmap(lambda seed: make(seed, graph), **mode)
    model, optimizer = make_many(jax.vmap(jax.random.key)(jnp.arange(3)))

    @nnx.jit(**mode)
    @nnx.vmap(in_axes=(0, 0, None, None), **mode)
    def step(model, optimizer, x, y):
      return train_step(model, optimizer, x, y, graph, graph_updates)

    losses = np.stack(
      [step(model, optimizer, x, y) for _ in range(NUM_STEPS)], axis=1
    )
    for seed in range(3):
      expected_losses, params = expected(seed)
      np.testing.assert_allclose(losses[seed], expected_losses, rtol=1e-5)
      np.testing.assert_allclose(
        model.first.kernel[seed], params['first']['kernel'], rtol=1e-4,
        atol=1e-5,
      )

  @parameterized.parameters(*MODES)
  def test_shard_map(self, graph, graph_updates):
    x, y = plain_optax.data()
    num_shards = max(n for n in (1, 2, 4, 8) if n <= jax.device_count())
    mesh = jax.make_mesh(
      (num_shards,), ('data',), axis_types=(jax.sharding.AxisType.Auto,)
    )
    model, optimizer = make(graph=graph)
    mean = lambda tree: jax.lax.pmean(tree, 'data')

    @nnx.jit(graph=graph, graph_updates=graph_updates)
    @nnx.shard_map(
      mesh=mesh, in_specs=(P(), P(), P('data'), P('data')), out_specs=P(),
      graph=graph, graph_updates=graph_updates,
    )
    def step(model, optimizer, x, y):
      return train_step(
        model, optimizer, x, y, graph, graph_updates, reduce=mean
      )

    losses = [step(model, optimizer, x, y) for _ in range(NUM_STEPS)]
    self.check(model, losses)


if __name__ == '__main__':
  absltest.main()
