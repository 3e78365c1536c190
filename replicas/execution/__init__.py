"""One step of the engine, whatever the device: the plan that the scheduler writes, the runner that turns it into a
batch, the sampler, drafts, and copies of KV blocks beside the steps. May import model and grammar. A new kind of step
goes here. Runners of a GPU are in gpu/, of several processes in parallel/.
"""
