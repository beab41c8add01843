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
"""Trains a small CNN on scikit-learn's digits, without tuning a learning rate.

  python -m pip install ".[examples]"
  python examples/nnx_linesearch/train.py --optimizer backtracking

The 1797 images of 8x8 pixels come with scikit-learn. BatchNorm and Dropout make
the loss depend on more than the parameters; ``value_and_update`` takes care
that a line search compares losses of one and the same function.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from rich.console import Console
from rich.progress import (
  BarColumn,
  MofNCompleteColumn,
  Progress,
  TextColumn,
  TimeElapsedColumn,
)
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from flax import nnx

matplotlib.use('Agg')

# L-BFGS learns from differences of successive gradients, so they must not
# differ by the batch or by the dropout mask: it gets all images at once.
DEFAULTS = {
  'backtracking': {'epochs': 30, 'batch_size': 128, 'dropout': 0.3},
  'adam': {'epochs': 30, 'batch_size': 128, 'dropout': 0.3},
  'lbfgs': {'epochs': 30, 'batch_size': None, 'dropout': 0.0},
}


class CNN(nnx.Module):
  """Two convolutions and a linear layer, for images of 8x8 pixels."""

  def __init__(self, dropout_rate: float, *, rngs: nnx.Rngs):
    self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
    self.norm1 = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
    self.conv2 = nnx.Conv(16, 32, (3, 3), strides=(2, 2), rngs=rngs)
    self.norm2 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
    self.dropout = nnx.Dropout(dropout_rate, rngs=rngs)
    self.linear = nnx.Linear(4 * 4 * 32, 10, rngs=rngs)

  def __call__(self, x):
    x = nnx.relu(self.norm1(self.conv1(x)))
    x = nnx.relu(self.norm2(self.conv2(x)))
    return self.linear(self.dropout(x.reshape(x.shape[0], -1)))


def make_optimizer(name: str, model: CNN) -> nnx.Optimizer:
  if name == 'backtracking':
    return nnx.optimizers.BacktrackingLinesearch(model, wrt=nnx.Param)
  if name == 'lbfgs':
    return nnx.optimizers.LBFGS(model, wrt=nnx.Param)
  return nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def loss_fn(model, images, labels):
  losses = optax.softmax_cross_entropy_with_integer_labels(
    model(images), labels
  )
  return losses.mean()


@nnx.jit
def train_step(model, optimizer, images, labels):
  return optimizer.value_and_update(loss_fn)(model, images, labels)


@nnx.jit
def accuracy(model, images, labels):
  return jnp.mean(model(images).argmax(-1) == labels)


def load(seed: int):
  """Images scaled to [0, 1], 80 % to train on and 20 % to test."""
  digits = load_digits()
  images = (digits.images / 16.0).astype(np.float32)[..., None]
  return train_test_split(
    images, digits.target, test_size=0.2, random_state=seed,
    stratify=digits.target,
  )


def train(name, epochs, batch_size, dropout, seed, console):
  """Returns the curves: per epoch, and the learning rate of each step."""
  train_x, test_x, train_y, test_y = load(seed)
  batch_size = min(batch_size or len(train_x), len(train_x))
  model = CNN(dropout, rngs=nnx.Rngs(seed))
  optimizer = make_optimizer(name, model)
  rng = np.random.default_rng(seed)
  num_batches = len(train_x) // batch_size
  curves = {'loss': [], 'accuracy': [], 'learning_rate': []}

  progress = Progress(
    TextColumn('{task.description}'), BarColumn(), MofNCompleteColumn(),
    TextColumn('loss {task.fields[loss]}'), TimeElapsedColumn(),
    console=console,
  )
  with progress:
    task = progress.add_task(name, total=epochs * num_batches, loss='-')
    for _ in range(epochs):
      order = rng.permutation(len(train_x))
      losses = []
      model.train()
      for i in range(num_batches):
        batch = order[i * batch_size : (i + 1) * batch_size]
        losses.append(
          train_step(model, optimizer, train_x[batch], train_y[batch])
        )
        if name != 'adam':
          curves['learning_rate'].append(
            optimizer.linesearch_info.learning_rate
          )
        progress.advance(task)
      curves['loss'].append(float(jnp.mean(jnp.stack(losses))))
      model.eval()
      curves['accuracy'].append(float(accuracy(model, test_x, test_y)))
      progress.update(task, loss=f'{curves["loss"][-1]:.4f}')
  return jax.device_get(curves), int(optimizer.step[...])


def plot(curves, name, path):
  from matplotlib import pyplot

  searched = len(curves['learning_rate']) > 0
  figure, axes = pyplot.subplots(
    1, 3 if searched else 2, figsize=(12 if searched else 8, 3.5),
    layout='constrained',
  )
  epochs = np.arange(1, len(curves['loss']) + 1)
  axes[0].semilogy(epochs, curves['loss'])
  axes[0].set(xlabel='epoch', ylabel='train loss (nats)', title='Loss')
  axes[1].plot(epochs, 100 * np.array(curves['accuracy']))
  axes[1].axhline(97, color='gray', linestyle=':', linewidth=1)
  axes[1].set(xlabel='epoch', ylabel='test accuracy (%)', title='Accuracy')
  if searched:
    steps = np.arange(1, len(curves['learning_rate']) + 1)
    axes[2].semilogy(steps, curves['learning_rate'], '.', markersize=3)
    axes[2].set(
      xlabel='step', ylabel='learning rate (dimensionless)',
      title='What the line search chose',
    )
  for axis in axes:
    axis.grid(alpha=0.3)
  figure.suptitle(f'Digits, {name}')
  figure.savefig(path, dpi=120)
  pyplot.close(figure)


def positive(text: str) -> int:
  number = int(text)
  if number < 1:
    raise argparse.ArgumentTypeError(f'must be at least 1, got {number}')
  return number


def main(argv=None):
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    '--optimizer', choices=tuple(DEFAULTS), default='backtracking'
  )
  parser.add_argument('--epochs', type=positive, help='default: 30')
  parser.add_argument(
    '--batch-size', type=positive, help='default: 128, lbfgs all images'
  )
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument(
    '--plot', default='nnx_linesearch.png', metavar='FILE',
    help='PNG of the curves (default: %(default)s)',
  )
  args = parser.parse_args(argv)
  defaults = DEFAULTS[args.optimizer]
  epochs = args.epochs or defaults['epochs']
  batch_size = args.batch_size or defaults['batch_size']

  console = Console()
  start = time.perf_counter()
  curves, num_steps = train(
    args.optimizer, epochs, batch_size, defaults['dropout'], args.seed, console
  )
  seconds = time.perf_counter() - start

  table = Table(title=f'Digits, {args.optimizer}')
  for heading in ('train loss', 'test accuracy', 'steps', 'seconds'):
    table.add_column(heading, justify='right')
  table.add_row(
    f'{curves["loss"][-1]:.4f}', f'{curves["accuracy"][-1]:.2%}',
    str(num_steps), f'{seconds:.1f}',
  )
  console.print(table)
  plot(curves, args.optimizer, args.plot)
  console.print(f'curves: {args.plot}')
  return curves


if __name__ == '__main__':
  main()
