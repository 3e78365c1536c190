"""Grammars at work: compiled and matched in processes that limits of the operating system can end, and the engine's
end of each. May import grammar.schema, grammar.regex and text.tokenizer. A message between engine and process
begins in host/child_frames.
"""
