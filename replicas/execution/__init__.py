"""One step of the engine, whatever the device: the plan that the scheduler writes, the runner that turns it into a
batch, the sampler, drafts. Pure data and protocols beside the plain runner; may import model and grammar. Runners
of a GPU are in gpu/, of several processes in parallel/.
"""
