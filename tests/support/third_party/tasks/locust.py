"""locust's users of OpenAI's interface, for as long as they need for 40 chats: none may fail."""

import os
import sys

os.environ["OPENAI_API_KEY"] = "none"

import gevent
from locust import task
from locust.contrib.oai import OpenAIUser
from locust.env import Environment

SAID = "Hello, I am a model of one layer, and I say what I was told to say."


class Reader(OpenAIUser):
    host = sys.argv[1]
    abstract = False

    def __init__(self, environment):
        super().__init__(environment)
        self.client.base_url = f"{sys.argv[1]}/v1"

    @task
    def chat(self):
        with self.client.rename_request("chat"):
            answer = self.client.chat.completions.create(
                model="parrot", messages=[{"role": "user", "content": "script:hello"}]
            )
        assert answer.choices[0].message.content == SAID
        if self.environment.stats.total.num_requests >= 40:
            self.environment.runner.quit()


environment = Environment(user_classes=[Reader], host=sys.argv[1])
runner = environment.create_local_runner()
runner.start(4, spawn_rate=4)
gevent.spawn_later(60, runner.quit)
runner.greenlet.join()
assert environment.stats.total.num_requests >= 40
assert environment.stats.total.num_failures == 0
assert not runner.exceptions, runner.exceptions
print("done")
