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
"""One step sees one function: the same masks, statistics, and one mutation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_optax
from absl.testing import absltest, parameterized

from flax import nnx

OPTIMIZERS = {
  'backtracking': optax.chain(
    optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15)
  ),
  'lbfgs': optax.lbfgs(),
  'adam': optax.adam(1e-2),
}


class Noisy(nnx.Module):
  """Reports what its Dropout and its BatchNorm do to each evaluation."""

  def __init__(self, report, rngs):
    self.report = report
    self.first = nnx.Linear(3, 8, rngs=rngs)
    self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.second = nnx.Linear(8, 2, rngs=rngs)

  def __call__(self, x):
    mask = self.dropout(jnp.ones(8)) > 0
    statistics = jnp.stack([self.norm.mean[...], self.norm.var[...]])
    jax.debug.callback(self.report, mask, statistics)
    h = self.norm(self.first(x))
    return self.second(jnp.where(mask[None], h, 0.0))


class Report:
  def __init__(self):
    self.calls = []

  def __call__(self, mask, statistics):
    self.calls.append((np.array(mask), np.array(statistics)))

  def take(self):
    jax.effects_barrier()
    calls, self.calls = self.calls, []
    return calls


def loss_fn(model, x, y):
  return jnp.mean((model(x) - y) ** 2)


class TestConsistentEvaluation(parameterized.TestCase):
  @parameterized.product(
    name=tuple(OPTIMIZERS), graph=(True, False), jit=(True, False)
  )
  def test_masks_and_statistics(self, name, graph, jit):
    report = Report()
    x, y = plain_optax.data()
    model = Noisy(report, nnx.Rngs(0))
    optimizer = nnx.Optimizer(
      model, OPTIMIZERS[name], wrt=nnx.Param, graph=graph
    )
    step = lambda model, optimizer: optimizer.value_and_update(loss_fn)(
      model, x, y
    )
    if jit:
      step = nnx.jit(step, graph=graph, graph_updates=graph)
    twin = Noisy(Report(), nnx.Rngs(0))  # makes the same forward passes
    masks = []

    for number in range(3):
      before = (model.norm.mean[...], model.norm.var[...])
      nnx.update(twin, nnx.state(model, nnx.Param))
      loss = step(model, optimizer)

      calls = report.take()
      self.assertGreaterEqual(len(calls), 1 if name == 'adam' else 2)
      for mask, statistics in calls:
        np.testing.assert_array_equal(mask, calls[0][0])
        np.testing.assert_allclose(statistics, before, rtol=1e-6)
      masks.append(calls[0][0])
      # What stays is what one forward pass leaves behind.
      np.testing.assert_allclose(loss, loss_fn(twin, x, y), rtol=1e-5)
      np.testing.assert_allclose(
        model.norm.mean, twin.norm.mean, rtol=1e-5, atol=1e-6
      )
      self.assertEqual(model.dropout.rngs.count[...], number + 1)

    self.assertFalse(np.array_equal(masks[0], masks[1]))
    self.assertFalse(np.array_equal(masks[1], masks[2]))

  def test_update_by_itself_sees_another_mask(self):
    """The gap that ``value_and_update`` closes."""
    report = Report()
    x, y = plain_optax.data()
    model = Noisy(report, nnx.Rngs(0))
    optimizer = nnx.Optimizer(
      model, OPTIMIZERS['backtracking'], wrt=nnx.Param
    )
    loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
    optimizer.update(model, grads, value=loss, value_fn=loss_fn, x=x, y=y)

    masks = [mask for mask, _ in report.take()]
    self.assertFalse(np.array_equal(masks[0], masks[1]))
    for mask in masks[2:]:
      np.testing.assert_array_equal(mask, masks[1])

  @parameterized.parameters(True, False)
  def test_accepted_loss_is_of_the_same_function(self, graph):
    """The Armijo inequality, recomputed with the mask of the step."""
    x, y = plain_optax.data()
    model = Noisy(Report(), nnx.Rngs(0))
    optimizer = nnx.optimizers.BacktrackingLinesearch(
      model, wrt=nnx.Param, graph=graph
    )
    for _ in range(4):
      before = nnx.clone(model)
      loss, grads = nnx.value_and_grad(loss_fn)(nnx.clone(model), x, y)
      optimizer.value_and_update(loss_fn)(model, x, y)

      info = optimizer.linesearch_info
      self.assertFalse(info.failed)
      nnx.update(before, nnx.state(model, nnx.Param))
      after = loss_fn(before, x, y)  # before's mask, the new parameters
      slope = -optax.tree.norm(grads, squared=True)
      self.assertLessEqual(
        after, loss + 1e-4 * info.learning_rate * slope + 1e-6
      )
      np.testing.assert_allclose(info.value, after, rtol=1e-5)


if __name__ == '__main__':
  absltest.main()
