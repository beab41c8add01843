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
"""The optimizers of the example, against what they mean in plain JAX."""

import ast
import functools
import importlib.util
import io
import pathlib
from contextlib import redirect_stdout

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized

from flax import nnx

SPEC = importlib.util.spec_from_file_location(
  'nnx_custom_optimizers',
  pathlib.Path(__file__).with_name('custom_optimizers.py'),
)
custom = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(custom)

MODES = ((True, True), (True, False), (False, False))
close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)


class Vector(nnx.Module):
  def __init__(self):
    self.w = nnx.Param(jnp.array([1.0, -2.0, 0.5]))
    self.num_calls = nnx.Variable(jnp.array(0))


def loss_fn(model):
  model.num_calls[...] += 1
  return plain_loss(model.w[...])


def plain_loss(w):
  return jnp.sum(jnp.array([1.0, 4.0, 9.0]) * w**2) / 2


def steps(make, num_steps=4, graph=True, graph_updates=True):
  """Parameters after each step, and the optimizer."""
  model = Vector()
  optimizer = make(model)
  step = nnx.jit(
    lambda model, optimizer: optimizer.value_and_update(loss_fn)(model),
    graph=graph, graph_updates=graph_updates,
  )  # fmt: skip
  trajectory = []
  for _ in range(num_steps):
    step(model, optimizer)
    trajectory.append(np.array(model.w))
  assert model.num_calls[...] == num_steps
  return trajectory, optimizer


class TestRungs(parameterized.TestCase):
  def test_sign_descent(self):
    trajectory, optimizer = steps(custom.sign_descent, num_steps=1)
    rate = float(optimizer.linesearch_info.learning_rate)
    w = np.array(Vector().w)
    close(trajectory[0], w - rate * np.sign(w))
    self.assertLess(plain_loss(trajectory[0]), plain_loss(w))

  def test_polyak(self):
    trajectory, _ = steps(custom.polyak, num_steps=1)
    w = np.array(Vector().w)
    value, grad = jax.value_and_grad(plain_loss)(w)
    rate = min(1.0, float(value / (grad @ grad)))
    close(trajectory[0], w - rate * grad)

  @parameterized.product(mode=MODES, rho=(0.05, 0.5))
  def test_sam(self, mode, rho):
    graph, graph_updates = mode
    trajectory, _ = steps(
      lambda model: custom.SAM(
        model, optax.sgd(0.1), rho=rho, wrt=nnx.Param, graph=graph
      ),
      graph=graph, graph_updates=graph_updates,
    )  # fmt: skip
    w = np.array(Vector().w)
    for found in trajectory:
      grad = jax.grad(plain_loss)(w)
      worst = w + rho * grad / np.linalg.norm(grad)
      w = w - 0.1 * jax.grad(plain_loss)(worst)
      close(found, w)

  @parameterized.parameters(True, False)
  def test_average(self, graph):
    trajectory, optimizer = steps(
      lambda model: custom.AveragingOptimizer(
        model, optax.sgd(0.1), decay=0.9, wrt=nnx.Param, graph=graph
      ),
      graph=graph, graph_updates=graph,
    )  # fmt: skip
    average = np.array(Vector().w)
    for w in trajectory:
      average = 0.9 * average + 0.1 * w
    close(optimizer.ema.params['w'][...], average)

  @parameterized.parameters('SAM', 'AveragingOptimizer')
  def test_at_most_15_lines(self, name):
    """Of code: the docstring and blank lines are not counted."""
    source = pathlib.Path(custom.__file__).read_text()
    (cls,) = (
      node
      for node in ast.parse(source).body
      if isinstance(node, ast.ClassDef) and node.name == name
    )
    lines = source.split('\n')[cls.lineno - 1 : cls.end_lineno]
    lines = [line for line in lines if line.strip()]
    self.assertIn('"""', lines[1])
    self.assertLessEqual(len(lines) - 1, 15)

  @parameterized.parameters(*custom.MAKE)
  def test_eager(self, name):
    x = jax.random.normal(jax.random.key(1), (8, 2))
    models = [custom.MLP(nnx.Rngs(0)) for _ in range(2)]
    eager, jitted = map(custom.MAKE[name], models)
    for _ in range(2):
      value = eager.value_and_update(custom.loss_fn)(models[0], x, x[:, 0])
      close(value, custom.train_step(models[1], jitted, x, x[:, 0]))

  def test_main(self):
    text = io.StringIO()
    with redirect_stdout(text):
      curves = custom.main(num_steps=30)
    for name, losses in curves.items():
      self.assertIn(name, text.getvalue())
      self.assertLess(losses[-1], 0.7 * losses[0], name)


if __name__ == '__main__':
  absltest.main()
