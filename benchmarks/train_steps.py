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
"""How long train steps take, as ratios measured side by side in one run.

  python -m pip install ".[benchmarks]"
  python benchmarks/train_steps.py

Each ratio compares two ways to make the same steps, which take turns; the
median over the turns is printed. Times depend on the machine, the ratios much
less so.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

from flax import nnx

NUM_STEPS = 20


class MLP(nnx.Module):
  def __init__(self, rngs: nnx.Rngs):
    self.layers = nnx.List(
      nnx.Linear(d_in, d_out, rngs=rngs)
      for d_in, d_out in ((64, 64), (64, 64), (64, 64), (64, 10))
    )

  def __call__(self, x):
    for layer in self.layers[:-1]:
      x = jnp.tanh(layer(x))
    return self.layers[-1](x)


def loss_fn(model, x, y):
  losses = optax.softmax_cross_entropy_with_integer_labels(model(x), y)
  return losses.mean()


def eager(model, optimizer, x, y):
  return optimizer.value_and_update(loss_fn)(model, x, y)


def uncompiled(model, optimizer, x, y):
  loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
  optimizer.update(model, grads, value=loss, value_fn=loss_fn, x=x, y=y)
  return loss


jitted = nnx.jit(eager)
by_hand = nnx.jit(uncompiled)


@nnx.jit
def reusing(model, optimizer, x, y):
  return optimizer.value_and_update(loss_fn, from_state=True)(model, x, y)


class Run:
  """One way to train, with a model of its own."""

  def __init__(self, tx, step, data, num_steps=NUM_STEPS):
    self.model = MLP(nnx.Rngs(0))
    self.optimizer = nnx.Optimizer(self.model, tx, wrt=nnx.Param)
    self.step, self.data, self.num_steps = step, data, num_steps

  def seconds_per_step(self):
    start = time.perf_counter()
    for _ in range(self.num_steps):
      result = self.step(self.model, self.optimizer, *self.data)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / self.num_steps


class Fit(Run):
  """The same steps by ``minimize``."""

  def seconds_per_step(self):
    start = time.perf_counter()
    jax.block_until_ready(
      nnx.optimizers.minimize(
        loss_fn, self.model, self.optimizer, *self.data,
        max_steps=self.num_steps, gtol=0.0,
      )
    )  # fmt: skip
    return (time.perf_counter() - start) / self.num_steps


def compare(first, second, rounds):
  """Median ratio of the times of two runs that take turns, and both times."""
  first.seconds_per_step(), second.seconds_per_step()  # compile
  pairs = [
    (first.seconds_per_step(), second.seconds_per_step())
    for _ in range(rounds)
  ]
  ratio = statistics.median(a / b for a, b in pairs)
  return ratio, *(1e3 * statistics.median(times) for times in zip(*pairs))


def main(argv=None):
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--rounds', type=int, default=7)
  rounds = parser.parse_args(argv).rounds
  digits = load_digits()
  x, y = jnp.asarray(digits.data / 16, np.float32), jnp.asarray(digits.target)
  data = (x, y)

  table = Table(title=f'Milliseconds per step, {rounds} rounds')
  for heading in ('optimizer', 'this', 'against', 'ms', 'ms', 'ratio'):
    table.add_column(heading)
  ratios = {}
  for name, tx in (('adam', optax.adam(1e-3)), ('lbfgs', optax.lbfgs())):
    few = 2 if name == 'lbfgs' else NUM_STEPS  # a second each
    cases = {
      'value_and_update / by hand': (
        Run(tx, jitted, data), Run(tx, by_hand, data)
      ),
      'eager value_and_update / jitted': (
        Run(tx, eager, data), Run(tx, jitted, data)
      ),
      'eager update / eager value_and_update': (
        Run(tx, uncompiled, data, few), Run(tx, eager, data, few)
      ),
      'minimize / jitted': (Fit(tx, None, data), Run(tx, jitted, data)),
    }  # fmt: skip
    if name == 'lbfgs':
      cases['from_state=True / False'] = (
        Run(tx, reusing, data), Run(tx, jitted, data)
      )  # fmt: skip
    for case, runs in cases.items():
      ratio, this, against = compare(*runs, rounds)
      ratios[name, case] = ratio
      table.add_row(
        name, *case.split(' / '), f'{this:.2f}', f'{against:.2f}',
        f'{ratio:.2f}',
      )  # fmt: skip
  Console().print(table)
  return ratios


if __name__ == '__main__':
  main()
