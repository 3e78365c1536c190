"""Packages that pip and npm install for each environment of third-party clients, and which tasks run in which.

Ranges: what was tried here, up to the next release that may break. Clients that get along share an environment.
"""

from __future__ import annotations

from collections.abc import Mapping

PYTHON: Mapping[str, tuple[str, ...]] = {
    "triton": ("tritonclient[grpc,http]>=2.60,<3",),
    "kserve": ("kserve>=0.21,<0.22",),
    "smg": ("smg-grpc-proto>=0.4.28,<0.5", "grpcio>=1.76,<2"),
    "openai": ("openai>=2,<4",),
    "lm_eval": ("lm_eval[api]>=0.4.12,<0.5",),  # without torch and transformers: it tokenizes at the service
    "vllm_router": ("vllm-router>=0.1.17,<0.2",),
    "sglang_router": ("sglang-router>=0.3.2,<0.4",),
    "guidellm": ("torch==2.13.0", "guidellm>=0.8.1,<0.9"),  # this torch: what it asks for, and no more than a CPU needs
    "grpc": ("grpcio-health-checking>=1.76,<2", "grpcio-reflection>=1.76,<2"),
    "langchain": (
        "langchain-openai>=1.7.4,<1.8",
        "langchain-community>=0.4.2,<0.5",
        "langgraph>=1.2.22,<1.3",
        "langchain>=1.5.2,<1.6",
    ),
    "litellm": (
        "litellm>=1.110,<1.111",
        "smolagents[litellm,openai]>=1.26,<1.27",
        "dspy>=3.4.1,<3.5",
        "mini-swe-agent>=2.4.6,<2.5",
    ),
    "agents": (
        "instructor>=1.17,<1.18",
        "pydantic-ai-slim[openai]>=2.38,<3",
        "openai-agents>=0.24,<0.25",
        "magentic>=0.41.1,<0.42",
        "llm>=0.36,<0.37",
        "chatlas>=0.23,<0.24",
    ),
    "llama_index": ("llama-index-llms-openai-like>=0.8.1,<0.9", "llama-index-embeddings-openai-like>=0.4,<0.5"),
    "haystack": ("haystack-ai>=3.4.1,<3.5",),
    "autogen": ("autogen-agentchat>=0.7.5,<0.8", "autogen-ext[openai]>=0.7.5,<0.8"),
    "ag2": ("ag2[openai]>=1.2.1,<1.3",),
    "semantic_kernel": ("semantic-kernel>=1.45,<1.46",),
    "http": (
        "huggingface_hub>=0.36,<3",
        "httpx-sse>=0.4.3,<0.5",
        "httpx",
        "aiohttp>=3.14,<4",
        "locust>=2.47,<3",
        "openai",
    ),
    "outlines": ("outlines[openai]>=1.3.3,<1.4",),
    "inspect": ("inspect-ai>=0.3.285,<0.4", "openai>=3,<4"),
    "open_inference": (
        "open-inference-openapi==2.0.0.1",
        "open-inference-grpc==2.0.0",
        "grpcio>=1.76,<2",  # it does not ask for these two
        "protobuf>=6,<8",
    ),
    "aider": ("aider-chat>=0.86.2,<0.87",),
}
NODE: tuple[str, ...] = (
    "openai@^6.49",
    "ai@^6.0.326",
    "@ai-sdk/openai-compatible@^2.0.92",
    "@langchain/openai@^1.5.8",
    "@langchain/core@^1.4",
    "@huggingface/inference@^4.13.30",
    "@openai/agents@^0.20",
    "@instructor-ai/instructor@^1.7",
    "@grpc/grpc-js@^1.14.7",
    "grpc-health-check@^2.1",
    "zod@^4.6",
)
# Each script of third_party/tasks, and the environment that it runs in; those of third_party/node_tasks share one.
TASKS: Mapping[str, str] = {
    "langchain": "langchain",
    "langchain_vllm": "langchain",
    "langgraph": "langchain",
    "litellm": "litellm",
    "smolagents": "litellm",
    "dspy": "litellm",
    "mini_swe_agent": "litellm",
    "instructor": "agents",
    "pydantic_ai": "agents",
    "openai_agents": "agents",
    "magentic": "agents",
    "llm": "agents",
    "chatlas": "agents",
    "llama_index": "llama_index",
    "haystack": "haystack",
    "autogen": "autogen",
    "ag2": "ag2",
    "semantic_kernel": "semantic_kernel",
    "huggingface_hub": "http",
    "sse": "http",
    "locust": "http",
    "outlines": "outlines",
    "inspect": "inspect",
    "open_inference": "open_inference",
    "aider": "aider",
}
NODE_TASKS = ("openai", "vercel_ai", "langchain", "huggingface", "openai_agents", "instructor", "grpc_health")
