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
"""The type hints of the public API, checked by mypy as a user would."""

import os
import pathlib
import subprocess
import sys
import tempfile

from absl.testing import absltest

HEADER = '''
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from typing_extensions import assert_type


class Net(nnx.Module):
  def __init__(self, rngs: nnx.Rngs):
    self.linear = nnx.Linear(2, 3, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.linear(x)


def loss_fn(model: Net, x: jax.Array) -> jax.Array:
  return jnp.mean(model(x) ** 2)


def with_aux(model: Net, x: jax.Array) -> tuple[jax.Array, dict[str, int]]:
  return jnp.mean(model(x) ** 2), {'n': 1}


model = Net(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.lbfgs(), wrt=nnx.Param)
x = jnp.ones((4, 2))
'''

RIGHT = '''
assert_type(optimizer, nnx.Optimizer[Net])
assert_type(optimizer.value_and_update(loss_fn)(model, x), jax.Array)
assert_type(optimizer.value_and_update(loss_fn, from_state=True)(model, x),
            jax.Array)
loss, aux = optimizer.value_and_update(with_aux, has_aux=True)(model, x)
assert_type(loss, jax.Array)
assert_type(aux, dict[str, int])
loss, grads = optimizer.value_and_grad(loss_fn)(model, x)
assert_type(loss, jax.Array)
assert_type(grads, nnx.State)
(loss, aux), grads = optimizer.value_and_grad(with_aux, has_aux=True)(model, x)
assert_type(aux, dict[str, int])
optimizer.update(model, grads, value=loss, value_fn=loss_fn, x=x)

search = nnx.optimizers.BacktrackingLinesearch(model, wrt=nnx.Param)
assert_type(search, nnx.optimizers.BacktrackingLinesearch[Net])
assert_type(search.value_and_update(loss_fn)(model, x), jax.Array)
search.update(model, grads, value=loss, value_fn=loss_fn, x=x)
assert_type(search.linesearch_info.learning_rate, jax.Array)
lbfgs = nnx.optimizers.LBFGS(model, wrt=nnx.Param, memory_size=5)
result = nnx.optimizers.minimize(loss_fn, model, lbfgs, x, max_steps=5)
assert_type(result, nnx.optimizers.MinimizeResult)
assert_type(result.num_steps, jax.Array)
nnx.optimizers.ZoomLinesearch(model, optax.sgd(1.0), wrt=nnx.Param)


@nnx.jit
def train_step(
  model: Net, optimizer: nnx.Optimizer[Net], x: jax.Array
) -> jax.Array:
  return optimizer.value_and_update(loss_fn)(model, x)
'''

WRONG = '''
optimizer.value_and_update(loss_fn)(x, x)  # no model
optimizer.value_and_update(loss_fn)(model)  # no data
optimizer.value_and_update(with_aux)(model, x)  # without has_aux
optimizer.value_and_update(loss_fn, has_aux=True)(model, x)  # no aux
optimizer.value_and_update(loss_fn, from_state='yes')(model, x)
nnx.optimizers.LBFGS(model, wrt=nnx.Param, memory_size='ten')
nnx.optimizers.minimize(loss_fn, x, optimizer, x)  # no model
'''


def mypy(text):
  """Returns whether mypy accepts a program, and its report."""
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / 'program.py'
    path.write_text(text)
    result = subprocess.run(
      [
        sys.executable, '-m', 'mypy', '--follow-imports=silent',
        '--ignore-missing-imports', '--strict-equality', '--pretty',
        '--check-untyped-defs', f'--cache-dir={folder}/cache', path.name,
      ],
      cwd=folder, capture_output=True, text=True,
      env={**os.environ, 'COLUMNS': '200'},
    )  # fmt: skip
    return result.returncode == 0, result.stdout + result.stderr


class TestTypes(absltest.TestCase):
  def test_right_program(self):
    accepted, report = mypy(HEADER + RIGHT)
    self.assertTrue(accepted, report)

  def test_wrong_program(self):
    """Each line is an error by itself."""
    accepted, report = mypy(HEADER + WRONG)
    self.assertFalse(accepted)
    first = HEADER.count('\n') + 1
    for number, line in enumerate(WRONG.strip().split('\n'), first + 1):
      self.assertIn(f'program.py:{number}: error', report, line)


if __name__ == '__main__':
  absltest.main()
