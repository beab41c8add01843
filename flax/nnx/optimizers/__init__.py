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
"""Optimizers that choose their own step, as ``nnx.Optimizer`` types.

Each is an :class:`~flax.nnx.Optimizer`: built from a model and a ``wrt``
filter, called as ``update(model, grads, ...)``, split, merged and checkpointed
alike.

* ``BacktrackingLinesearch``: any descent direction, with a learning rate that
  is shortened until the loss decreases enough (Armijo).
* ``ZoomLinesearch``: any descent direction, with a learning rate at which the
  slope has flattened as well (strong Wolfe conditions).
* ``LBFGS``: the quasi-Newton direction, with a zoom line search.
* ``minimize``: a whole fit in one call, with any optimizer.
* ``LinesearchInfo``: what the last line search found.

The mathematics is optax's; the types here bring it to Modules.
"""

from ._minimize import MinimizeResult as MinimizeResult
from ._minimize import minimize as minimize
from ._search import LinesearchInfo as LinesearchInfo
from .backtracking import BacktrackingLinesearch as BacktrackingLinesearch
from .lbfgs import LBFGS as LBFGS
from .zoom import ZoomLinesearch as ZoomLinesearch
