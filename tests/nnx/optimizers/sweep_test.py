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
"""One train step runs with every public optimizer of optax that runs at all."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import plain_optax
from absl.testing import absltest, parameterized

from flax import nnx

# Ingredients for functions with required arguments. Everything else that is
# public and returns a transformation is found by itself.
RECIPES = {
  'adaptive_grad_clip': lambda f: f(0.1),
  'add_noise': lambda f: f(0.01, 0.5, 0),
  'apply_if_finite': lambda f: f(optax.adam(0.1), 3),
  'chain': lambda f: f(optax.adam(0.1), optax.scale(0.5)),
  'clip': lambda f: f(0.1),
  'clip_by_block_rms': lambda f: f(0.1),
  'clip_by_global_norm': lambda f: f(0.1),
  'conditionally_mask': lambda f: f(optax.adam(0.1), lambda step: step < 5),
  'conditionally_transform': lambda f: f(
    optax.adam(0.1), lambda step: step < 5
  ),
  'ema': lambda f: f(0.9),
  'flatten': lambda f: f(optax.adam(0.1)),
  'freeze': lambda f: f(
    lambda params: jax.tree.map(lambda x: x.ndim == 1, params)
  ),
  'inject_hyperparams': lambda f: f(optax.adam)(learning_rate=0.1),
  'masked': lambda f: f(
    optax.adam(0.1), lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
  ),
  'mechanize': lambda f: f(optax.sgd(0.1)),
  'multi_transform': lambda f: f(
    {'x': optax.adam(0.1)}, lambda params: jax.tree.map(lambda _: 'x', params)
  ),
  'partition': lambda f: f(
    {'x': optax.lbfgs()}, lambda params: jax.tree.map(lambda _: 'x', params),
    mask_compatible_extra_args=True,
  ),
  'sam': lambda f: f(
    optax.sgd(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
  ),
  'scale': lambda f: f(-0.1),
  'scale_by_backtracking_linesearch': lambda f: optax.chain(
    optax.sgd(1.0), f(10)
  ),
  'scale_by_schedule': lambda f: f(lambda step: -0.1 / (1 + step)),
  'scale_by_zoom_linesearch': lambda f: optax.chain(optax.sgd(1.0), f(10)),
  'schedule_free': lambda f: f(optax.sgd(0.1), 0.1),
  'selective_transform': lambda f: f(
    optax.adam(0.1),
    freeze_mask=lambda params: jax.tree.map(lambda x: x.ndim == 1, params),
  ),
  'split_real_and_imaginary': lambda f: f(optax.adam(0.1)),
  'stateless': lambda f: f(
    lambda updates, params: jax.tree.map(lambda u: -0.1 * u, updates)
  ),
  'stateless_with_tree_map': lambda f: f(lambda u, p: -0.1 * u),
  'trace': lambda f: f(0.9),
  'with_extra_args_support': lambda f: f(optax.scale(-0.1)),
  'MultiSteps': lambda f: f(optax.lbfgs(), 2),
}

# With ``value`` and ``value_fn`` alone plain optax raises for these as well.
NOT_RUN = {
  'differentially_private_aggregate': 'gradients per example',
  'dpsgd': 'gradients per example',
  'hutchinson_estimator_diag_hessian': 'obj_fn',
  'inject_stateful_hyperparams': 'deprecated for inject_hyperparams',
  'lookahead': 'LookaheadParams',
  'monitor': 'measures of the caller',
  'measure_with_ema': 'not an optimizer',
  'snapshot': 'not an optimizer',
  'named_chain': 'an empty chain; see chain',
  'scale_by_muon': 'dimension numbers, which muon gives it',
  'sophia': 'obj_fn',
}


def _make(function):
  name = function.__name__
  if name in NOT_RUN:
    return None
  if name in RECIPES:
    return RECIPES[name](function)
  for kwargs in ({}, {'learning_rate': 0.1}):
    try:
      tx = function(**kwargs)
    except Exception:
      continue
    if hasattr(tx, 'init') and hasattr(tx, 'update'):
      return tx
  return None


def public_optimizers():
  """All (name, transformation) of ``optax`` and ``optax.contrib``."""
  found = {}
  for module in (optax, optax.contrib):
    for name, function in vars(module).items():
      is_class = inspect.isclass(function) and name != 'MultiSteps'
      if name.startswith('_') or not callable(function) or is_class:
        continue
      if not getattr(function, '__module__', '').startswith('optax.'):
        continue
      tx = _make(function)
      if tx is not None:
        found[name] = tx
  return sorted(found.items())


OPTIMIZERS = public_optimizers()


class TestSweep(parameterized.TestCase):
  def test_finds_the_optimizers(self):
    names = {name for name, _ in OPTIMIZERS}
    self.assertContainsSubset(
      {'adam', 'lbfgs', 'polyak_sgd', 'sam', 'muon', 'MultiSteps', 'momo'},
      names,
    )
    self.assertGreater(len(names), 100)
    self.assertContainsSubset(set(RECIPES), names)

  @parameterized.named_parameters(*OPTIMIZERS)
  @jax.numpy_rank_promotion('allow')  # some transformations of optax need it
  def test_train_step(self, tx):
    n = 0
    x, y = plain_optax.data()
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.as_pure(nnx.state(model)))
    params = jax.tree.map(jnp.array, params)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    # Donation also shows that no two leaves of the state share a buffer.
    @nnx.jit(donate_argnums=(0, 1))
    def train_step(model, optimizer, x, y):
      nonlocal n
      n += 1
      loss_fn = lambda model: jnp.mean((model(x) - y) ** 2)
      loss, grads = nnx.value_and_grad(loss_fn)(model)
      optimizer.update(model, grads, value=loss, value_fn=loss_fn)
      return loss

    losses = [train_step(model, optimizer, x, y) for _ in range(3)]

    def plain_loss(params):
      out = x @ params['kernel'] + params['bias'][None]
      return jnp.mean((out - y) ** 2)

    is_search = 'linesearch' in str(jax.tree.structure(tx.init(params))).lower()

    def extra(value, grad):
      args = {'value': value, 'value_fn': plain_loss}
      return {**args, 'grad': grad} if is_search else args

    expected, _ = plain_optax.fit(tx, params, plain_loss, 3, extra)
    np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-6)
    self.assertEqual(n, 1)
    self.assertEqual(optimizer.step[...], 3)


if __name__ == '__main__':
  absltest.main()
