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
"""The Python blocks of the README run as they stand, one after the other."""

import io
import re
from contextlib import redirect_stdout

import jax.numpy as jnp
import workplace
from absl.testing import absltest

from flax import nnx


class TestReadme(absltest.TestCase):
  def test_blocks_run(self):
    text = (workplace.ROOT / 'README.md').read_text()
    blocks = re.findall(r'```python\n(.*?)```', text, re.DOTALL)
    self.assertGreaterEqual(len(blocks), 4)
    names, printed = {}, io.StringIO()

    with redirect_stdout(printed):
      for number, block in enumerate(blocks):
        exec(compile(block, f'README.md, block {number}', 'exec'), names)

    # The first prints the losses of five steps of L-BFGS, which go down.
    losses = [float(line) for line in printed.getvalue().split('\n')[:5]]
    self.assertLess(losses[-1], 1e-3 * losses[0])
    self.assertIn('LinesearchInfo', printed.getvalue())
    optimizer = names['SAM'](
      names['model'], names['optax'].sgd(0.1), wrt=nnx.Param
    )
    loss_fn = lambda model: (model(jnp.ones((4, 2))) ** 2).mean()
    optimizer.update(
      names['model'], nnx.grad(loss_fn)(names['model']), value_fn=loss_fn
    )


if __name__ == '__main__':
  absltest.main()
