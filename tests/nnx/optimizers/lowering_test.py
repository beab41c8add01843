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
"""Train steps lower for every backend, without one at hand."""

import functools

import jax
import jax.numpy as jnp
import optax
from absl.testing import absltest, parameterized

from flax import nnx

# What ``jax.export`` knows, not what this machine has.
PLATFORMS = ('cpu', 'cuda', 'rocm', 'tpu')


class Net(nnx.Module):
  def __init__(self, rngs):
    self.linear = nnx.Linear(3, 4, rngs=rngs)
    self.norm = nnx.BatchNorm(4, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, x):
    return self.dropout(self.norm(self.linear(x)))


def loss_fn(model, x):
  return (model(x) ** 2).mean()


def update(model, optimizer, x):
  loss, grads = nnx.value_and_grad(loss_fn)(model, x)
  optimizer.update(model, grads, value=loss, value_fn=loss_fn, x=x)
  return loss


def value_and_update(model, optimizer, x):
  return optimizer.value_and_update(loss_fn)(model, x)


def from_state(model, optimizer, x):
  model.eval()
  return optimizer.value_and_update(loss_fn, from_state=x[0, 0] > 0)(model, x)


def minimize(model, optimizer, x):
  return nnx.optimizers.minimize(
    loss_fn, model, optimizer, x, max_steps=3
  ).value


MAKE = {
  'adam': lambda m: nnx.Optimizer(m, optax.adam(0.1), wrt=nnx.Param),
  'optax_lbfgs': lambda m: nnx.Optimizer(m, optax.lbfgs(), wrt=nnx.Param),
  'backtracking': lambda m: nnx.optimizers.BacktrackingLinesearch(
    m, wrt=nnx.Param, store_grad=True
  ),
  'zoom': lambda m: nnx.optimizers.ZoomLinesearch(m, wrt=nnx.Param),
  'lbfgs': lambda m: nnx.optimizers.LBFGS(m, wrt=nnx.Param),
}


class TestLowering(parameterized.TestCase):
  @parameterized.product(
    name=tuple(name for name in MAKE if name != 'adam'),
    step=(update, value_and_update, from_state, minimize),
  )
  def test_line_searches(self, name, step):
    self.check(name, step)

  @parameterized.parameters(update, value_and_update, minimize)
  def test_adam(self, step):
    self.check('adam', step)

  def check(self, name, step):
    model = Net(nnx.Rngs(0))
    graphdef, state = nnx.split((model, MAKE[name](model)))
    # Exported functions take no typed keys.
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    leaves, treedef = jax.tree.flatten(state)
    keys = [is_key(x) for x in leaves]
    leaves = [jax.random.key_data(x) if is_key(x) else x for x in leaves]

    @jax.jit
    def train_step(leaves, x):
      leaves = [
        jax.random.wrap_key_data(leaf) if key else leaf
        for key, leaf in zip(keys, leaves)
      ]
      model, optimizer = nnx.merge(graphdef, treedef.unflatten(leaves))
      return step(model, optimizer, x)

    export = jax.export.export(train_step, platforms=PLATFORMS)
    exported = export(leaves, jnp.ones((8, 3)))
    self.assertEqual(exported.platforms, PLATFORMS)
    call = functools.partial(exported.call, leaves)
    if jax.default_backend() in PLATFORMS:
      loss = call(jnp.ones((8, 3)))
      self.assertTrue(jnp.isfinite(loss))


if __name__ == '__main__':
  absltest.main()
