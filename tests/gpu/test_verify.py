"""Proofs on the GPU: the tests of routes, verdicts and merge lanes with the device changed."""

from tests.verification.merges.test_lanes import *
from tests.verification.routes.test_routes import *
from tests.verification.test_verify import *
