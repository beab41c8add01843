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
"""Optima that ``nnx.optimizers.minimize`` finds, against SciPy and theory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.linalg
import scipy.optimize
from absl.testing import absltest, parameterized
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from flax import nnx

close = np.testing.assert_allclose
minimize = nnx.optimizers.minimize


def in_x64(test):
  @functools.wraps(test)
  def wrapper(*args, **kwargs):
    with jax.enable_x64(True):
      return test(*args, **kwargs)

  return wrapper


class Vector(nnx.Module):
  def __init__(self, start):
    self.x = nnx.Param(jnp.asarray(start))


def rosenbrock(model):
  x = model.x[...]
  return jnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)


class TestFunctions(parameterized.TestCase):
  @parameterized.product(size=(2, 10), graph=(True, False))
  @in_x64
  def test_rosenbrock(self, size, graph):
    start = np.tile([-1.2, 1.0], size // 2)
    model = Vector(start)
    optimizer = nnx.optimizers.LBFGS(model, wrt=nnx.Param, graph=graph)
    result = minimize(rosenbrock, model, optimizer, gtol=1e-8)

    scipys = scipy.optimize.minimize(
      scipy.optimize.rosen, start, jac=scipy.optimize.rosen_der,
      method='L-BFGS-B', options={'gtol': 1e-9, 'ftol': 0.0},
    )  # fmt: skip
    self.assertTrue(result.converged)
    close(model.x, np.ones(size), atol=1e-7)  # the published optimum
    close(model.x, scipys.x, atol=1e-6)
    close(result.value, 0.0, atol=1e-15)
    close(
      result.grad_norm,
      np.linalg.norm(scipy.optimize.rosen_der(np.array(model.x))),
      atol=1e-10,
    )
    self.assertLess(result.num_steps, 2 * scipys.nit)

  @parameterized.parameters(2, 10)
  def test_rosenbrock_in_float32(self, size):
    model = Vector(np.tile(np.float32([-1.2, 1.0]), size // 2))
    optimizer = nnx.optimizers.LBFGS(model, wrt=nnx.Param)
    result = minimize(rosenbrock, model, optimizer, gtol=1e-3)
    self.assertTrue(result.converged)
    close(model.x, np.ones(size), atol=2e-3)

  @in_x64
  def test_quadratic_with_condition_number_10000(self):
    rng = np.random.default_rng(0)
    q, _ = np.linalg.qr(rng.normal(size=(20, 20)))
    a = (q * np.logspace(0, 4, 20)) @ q.T
    b = rng.normal(size=20)
    model = Vector(np.zeros(20))
    optimizer = nnx.optimizers.LBFGS(model, wrt=nnx.Param)
    result = minimize(
      lambda model, a, b: model.x @ a @ model.x / 2 - b @ model.x,
      model, optimizer, a, b,
    )  # fmt: skip
    self.assertTrue(result.converged)
    solution = np.linalg.solve(a, b)
    # The smallest eigenvalue is 1, so the error is at most the gradient norm.
    self.assertLessEqual(np.linalg.norm(model.x - solution), 1e-5)
    close(result.value, -b @ solution / 2, rtol=1e-10)


class TestModels(parameterized.TestCase):
  @in_x64
  def test_logistic_regression(self):
    x, y = load_breast_cancer(return_X_y=True)
    x = StandardScaler().fit_transform(x)

    def loss_fn(model, x, y):
      logits = model(x)[:, 0]
      losses = optax.sigmoid_binary_cross_entropy(logits, y)
      return jnp.sum(losses) + jnp.sum(model.kernel**2) / 2  # C = 1

    model = nnx.Linear(
      30, 1, param_dtype='float64', kernel_init=nnx.initializers.zeros,
      rngs=nnx.Rngs(0),
    )
    optimizer = nnx.optimizers.LBFGS(model, wrt=nnx.Param)
    result = minimize(loss_fn, model, optimizer, x, y, gtol=1e-6)

    theirs = LogisticRegression(C=1.0, tol=1e-10, max_iter=10_000).fit(x, y)
    self.assertTrue(result.converged)
    close(model.kernel[:, 0], theirs.coef_[0], atol=1e-4)
    close(model.bias, theirs.intercept_, atol=1e-4)

  @in_x64
  def test_gaussian_process(self):
    """Negative log marginal likelihood of a squared-exponential kernel."""
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(-3, 3, 30))
    y = np.sin(2 * x) + 0.1 * rng.normal(size=30)
    squares = (x[:, None] - x[None]) ** 2

    class GaussianProcess(nnx.Module):
      def __init__(self):
        self.log_length = nnx.Param(jnp.zeros(()))
        self.log_scale = nnx.Param(jnp.zeros(()))
        self.log_noise = nnx.Param(jnp.zeros(()))

    def loss_fn(model, squares, y):
      length, scale, noise = (
        jnp.exp(p[...])
        for p in (model.log_length, model.log_scale, model.log_noise)
      )
      k = scale**2 * jnp.exp(-squares / (2 * length**2))
      k += noise**2 * jnp.eye(len(y))
      factor = jnp.linalg.cholesky(k)
      half = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
      return half @ half / 2 + jnp.sum(jnp.log(jnp.diagonal(factor)))

    def independent(parameters):
      length, scale, noise = np.exp(parameters)
      k = scale**2 * np.exp(-squares / (2 * length**2))
      k += noise**2 * np.eye(len(y))
      _, log_determinant = np.linalg.slogdet(k)
      return y @ scipy.linalg.solve(k, y, assume_a='pos') / 2 + (
        log_determinant / 2
      )

    model = GaussianProcess()
    optimizer = nnx.optimizers.LBFGS(model, wrt=nnx.Param)
    result = minimize(loss_fn, model, optimizer, squares, y, gtol=1e-7)

    theirs = scipy.optimize.minimize(
      independent, np.zeros(3), method='L-BFGS-B',
      options={'gtol': 1e-8, 'ftol': 1e-15},
    )  # fmt: skip
    self.assertTrue(result.converged)
    self.assertEqual(result.value.dtype, 'float64')
    found = [model.log_length[...], model.log_scale[...], model.log_noise[...]]
    close(found, theirs.x, atol=1e-4)
    close(result.value, theirs.fun, rtol=1e-8)
    close(result.value, independent(np.array(found)), rtol=1e-10)


class TestPhysicsInformedNetwork(parameterized.TestCase):
  """``u'' = -pi^2 sin(pi x)`` on [0, 1], zero at the ends: u = sin(pi x)."""

  @parameterized.parameters(True, False)
  def test_adam_hands_over_to_lbfgs(self, graph):
    class Network(nnx.Module):
      def __init__(self, rngs):
        self.first = nnx.Linear(1, 16, rngs=rngs)
        self.second = nnx.Linear(16, 16, rngs=rngs)
        self.last = nnx.Linear(16, 1, rngs=rngs)

      def __call__(self, x):
        h = jnp.tanh(self.first(x[None]))
        h = jnp.tanh(self.second(h))
        return x * (1 - x) * self.last(h)[0]

    def loss_fn(model, x):
      curvature = jax.vmap(jax.grad(jax.grad(lambda x: model(x))))(x)
      return jnp.mean((curvature + jnp.pi**2 * jnp.sin(jnp.pi * x)) ** 2)

    def relative_error(model):
      x = jnp.linspace(0.0, 1.0, 101)
      exact = jnp.sin(jnp.pi * x)
      return jnp.linalg.norm(jax.vmap(model)(x) - exact) / (
        jnp.linalg.norm(exact)
      )

    x = jnp.linspace(0.0, 1.0, 64)
    model = Network(nnx.Rngs(0))
    adam = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param, graph=graph)
    lbfgs = nnx.optimizers.LBFGS(model, wrt=nnx.Param, graph=graph)

    first = minimize(loss_fn, model, adam, x, max_steps=50)
    rough = relative_error(model)
    # L-BFGS was made before Adam moved the model: it starts where that ended.
    start = float(loss_fn(model, x))
    close(first.value, start, rtol=1e-4)
    step = minimize(loss_fn, model, lbfgs, x, max_steps=1)
    self.assertLess(step.value, start)
    result = minimize(loss_fn, model, lbfgs, x, max_steps=500, gtol=1e-3)

    self.assertGreater(rough, 1e-3)
    self.assertLess(relative_error(model), 1e-3)
    self.assertLess(result.value, 1e-2 * first.value)
    self.assertEqual(adam.step[...], 50)


if __name__ == '__main__':
  absltest.main()
