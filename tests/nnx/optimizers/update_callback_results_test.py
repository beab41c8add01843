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
"""What becomes of the results of callbacks, and of masked parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_optax
from absl.testing import absltest, parameterized
from probe import probe

from flax import nnx

MODES = ((True, True), (True, False), (False, False))


class TestWhatCallbacksReturn(parameterized.TestCase):
  @parameterized.parameters(*MODES)
  def test_grads_become_a_params_tree(self, graph, graph_updates):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    grad_fn = nnx.grad(
      lambda m: (m.kernel[...] ** 2).sum(),
      graph=graph, graph_updates=graph_updates,
    )
    results = probe(grad_fn, model, graph=graph)
    params = nnx.as_pure(nnx.state(model))
    self.assertEqual(jax.tree.structure(results[0]), jax.tree.structure(params))
    np.testing.assert_allclose(
      results[0]['kernel'], 2 * (params['kernel'] + 1), rtol=1e-6
    )

  def test_grads_are_filtered_by_wrt(self):
    model = nnx.LoRA(
      2, 1, 3, base_module=nnx.Linear(2, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1)
    )
    grad_all = lambda model: nnx.grad(lambda m: m(jnp.ones(2)).sum())(model)
    results = probe(
      lambda model: (0.5, grad_all(model)), model, wrt=nnx.LoRAParam
    )
    value, grads = results[0]
    self.assertEqual(value, 0.5)
    self.assertEqual(set(grads), {'lora_a', 'lora_b'})

  def test_variables_become_arrays(self):
    results = probe(lambda model: {'b': model.bias})
    self.assertIsInstance(results[0]['b'], jax.Array)


class TestMaskedParams(parameterized.TestCase):
  def test_filled_and_masked_again(self):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))

    def mask(params):
      return jax.tree.map(
        lambda p: p + 1 if p.ndim == 2 else optax.MaskedNode(), params
      )

    seen = []

    def fn(model):
      seen.append(model)
      return nnx.grad(lambda m: (m.kernel[...] ** 2).sum())(model)

    results = probe(fn, model, candidate=mask)
    np.testing.assert_array_equal(seen[0].kernel, model.kernel + 1)
    np.testing.assert_array_equal(seen[0].bias, model.bias)
    self.assertIsInstance(results[0]['bias'], optax.MaskedNode)
    np.testing.assert_allclose(
      results[0]['kernel'], 2 * (model.kernel[...] + 1), rtol=1e-6
    )

  @parameterized.parameters('masked', 'partition')
  def test_equals_plain_optax(self, kind):
    kernels = lambda tree: jax.tree.map(lambda x: x.ndim == 2, tree)
    if kind == 'masked':  # biases pass through: they get ``-grad``
      tx = optax.chain(
        optax.scale(-0.1),
        optax.masked(
          optax.lbfgs(), kernels, mask_compatible_extra_args=True
        ),
      )
    else:
      tx = optax.partition(
        {True: optax.lbfgs(), False: optax.sgd(0.1)},
        kernels,
        mask_compatible_extra_args=True,
      )
    x, y = plain_optax.data()
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.as_pure(nnx.state(model)))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer):
      loss_fn = lambda model: jnp.mean((model(x) - y) ** 2)
      loss, grads = nnx.value_and_grad(loss_fn)(model)
      optimizer.update(model, grads, value=loss, value_fn=loss_fn)
      return loss

    def plain_loss(params):
      out = x @ params['kernel'] + params['bias'][None]
      return jnp.mean((out - y) ** 2)

    @jax.jit
    def plain_step(params, state):
      value, grad = jax.value_and_grad(plain_loss)(params)
      updates, state = tx.update(
        grad, state, params, value=value, grad=grad,
        value_fn=lambda kernel: plain_loss(
          {'kernel': kernel['kernel'], 'bias': params['bias']}
        ),
      )
      return optax.apply_updates(params, updates), state, value

    state = tx.init(params)
    for _ in range(4):
      params, state, expected = plain_step(params, state)
      np.testing.assert_allclose(
        train_step(model, optimizer), expected, rtol=1e-5
      )
    np.testing.assert_allclose(model.kernel, params['kernel'], rtol=1e-3)


if __name__ == '__main__':
  absltest.main()
