"""One engine serving one model: it loads weights, schedules requests, runs steps and turns tokens into text."""
