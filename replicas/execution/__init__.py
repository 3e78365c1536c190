"""One step of the engine, whatever the device: the plan that the scheduler writes, the runner that turns it into a
batch, the sampler, drafts. Pure data and protocols beside the plain runner; may import model, grammar and, for the type
of what copies KV, gpu. A new kind of step goes here. Runners of a GPU are in gpu/, of several processes in parallel/.
"""
