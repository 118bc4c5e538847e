module kvferry/llmd

go 1.19

require github.com/llm-d/llm-d-router v0.0.0

replace github.com/llm-d/llm-d-router => ./restated
