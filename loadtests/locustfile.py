"""Load tests: `locust -f loadtests/locustfile.py --host http://127.0.0.1:8000`, or `make loadtest`.

Users stream over motley.v1 (GrpcUser), OpenAI's protocol (OpenAIUser) and KServe's (KServeUser): all three, or those
that are named. Locust's own options say how many there are, for how long, and on how many workers.
"""

from motley_bench.locust_load.chosen_shape import ChosenShape
from motley_bench.locust_load.event_stream_users import KServeUser, OpenAIUser
from motley_bench.locust_load.grpc_user import GrpcUser

__all__ = ["ChosenShape", "GrpcUser", "KServeUser", "OpenAIUser"]
