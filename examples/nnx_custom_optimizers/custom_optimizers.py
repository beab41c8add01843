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
"""Optimizers of your own, from one line to a new type.

  python examples/nnx_custom_optimizers/custom_optimizers.py

1. Own direction: any ``optax.GradientTransformation`` under a line search.
2. Scalar extras: an optax transformation that wants the loss.
3. Own type: a subclass of ``nnx.Optimizer`` that derives its extra arguments
   (``SAM``), or adds something to each update (``AveragingOptimizer``).

All of them are used by one and the same ``train_step``.
"""

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table

from flax import nnx


# Rung 1: the sign of the gradient, with a learning rate that is searched for.
def sign_descent(model):
  return nnx.optimizers.BacktrackingLinesearch(
    model, optax.chain(optax.scale_by_sign(), optax.scale(-1.0)), wrt=nnx.Param
  )


# Rung 2: Polyak's step size, loss / |gradient|^2.
def polyak(model):
  return nnx.Optimizer(model, optax.polyak_sgd(1.0), wrt=nnx.Param)


# Rung 3: a type of its own.
class SAM(nnx.Optimizer):
  """Sharpness-aware minimization: the gradient at the worst point nearby."""

  def __init__(self, model, tx, *, rho=0.05, wrt, graph=None):
    ascent = optax.chain(optax.contrib.normalize(), optax.sgd(rho))
    tx = optax.contrib.sam(tx, ascent, sync_period=2, opaque_mode=True)
    super().__init__(model, tx, wrt=wrt, graph=graph)

  def extra_args(self, model, grads, kwargs):
    grad = nnx.grad(kwargs['value_fn'], argnums=nnx.DiffState(0, self.wrt))
    grad_fn = lambda model, i: grad(model)
    return super().extra_args(model, grads, {'grad_fn': grad_fn})


class AveragingOptimizer(nnx.Optimizer):
  """Keeps an exponential moving average of the parameters, in ``ema``."""

  def __init__(self, model, tx, *, decay=0.99, wrt, graph=None):
    super().__init__(model, tx, wrt=wrt, graph=graph)
    self.ema = nnx.EMA(model, decay, only=wrt, graph=graph)

  def update(self, model, grads, /, **kwargs):
    updates = super().update(model, grads, **kwargs)
    self.ema.update(model)
    return updates


MAKE = {
  'sign_descent': sign_descent,
  'polyak': polyak,
  'SAM': lambda model: SAM(model, optax.sgd(0.1), wrt=nnx.Param),
  'AveragingOptimizer': lambda model: AveragingOptimizer(
    model, optax.adam(0.01), decay=0.9, wrt=nnx.Param
  ),
}


class MLP(nnx.Module):
  def __init__(self, rngs: nnx.Rngs):
    self.first = nnx.Linear(2, 16, rngs=rngs)
    self.second = nnx.Linear(16, 1, rngs=rngs)

  def __call__(self, x):
    return self.second(jnp.tanh(self.first(x)))[:, 0]


def loss_fn(model, x, y):
  return jnp.mean((model(x) - y) ** 2)


@nnx.jit
def train_step(model, optimizer, x, y):
  return optimizer.value_and_update(loss_fn)(model, x, y)


def main(num_steps=100):
  x = jax.random.normal(jax.random.key(0), (64, 2))
  y = jnp.sin(2 * x[:, 0]) * x[:, 1]
  table = Table(title=f'Mean squared error, {num_steps} steps')
  for heading in ('optimizer', 'first', 'last'):
    table.add_column(heading)
  curves = {}
  for name, make in MAKE.items():
    model = MLP(nnx.Rngs(0))
    optimizer = make(model)
    losses = [train_step(model, optimizer, x, y) for _ in range(num_steps)]
    curves[name] = [float(loss) for loss in losses]
    table.add_row(name, f'{losses[0]:.4f}', f'{losses[-1]:.4f}')
  Console().print(table)
  return curves


if __name__ == '__main__':
  main()
