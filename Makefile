# Each target is one line calling a script. PYTHON is what the environment is built with: 3.11 or 3.12.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3,$(shell command -v $(name) 2>/dev/null)))
ifeq ($(PYTHON),)
$(error Python 3.11 or 3.12 is needed, and none is on PATH)
endif
VENV := .venv/bin

# make serve MODEL=/a/folder PORT=8000 GRPC_PORT=8001 METRICS_PORT=8002 VARIANT=awq HOST=127.0.0.1 NAME=… INSTANCES=1 \
#            GATEWAY=0 GATEWAY_PORT=9000
PORT ?= 8000
HTTP_PORT ?= $(PORT)
GRPC_PORT ?= $(shell expr $(HTTP_PORT) + 1)
METRICS_PORT ?= $(shell expr $(HTTP_PORT) + 2)
VARIANT ?=
HOST ?= 127.0.0.1
INSTANCES ?= 1
GATEWAY ?= 1
GATEWAY_PORT ?= 9000
# make load SCENARIO=ramp TARGET=http://127.0.0.1:9000
SCENARIO ?= steady
TARGET ?= $(HOST):$(GRPC_PORT)
# make image BASE_IMAGE=debian:bookworm-slim KIND=cpu
BUILD = $(foreach name,BASE_IMAGE KIND,$(if $($(name)),--build-arg $(name)=$($(name))))
SERVE = --model "$(MODEL)" --name "$(NAME)" --variant "$(VARIANT)" --host "$(HOST)" --instances $(INSTANCES) \
	--http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) --metrics-port $(METRICS_PORT) \
	--gateway-port $(GATEWAY_PORT) $(if $(filter 0 no false,$(GATEWAY)),--no-gateway)

.DEFAULT_GOAL := help
.PHONY: help environment environment-dev serve chat test test-container image lint format bench load doctor configs lock clean

help: ## show the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

environment: ## build .venv with what the server needs; nothing to do when it is there
	@$(PYTHON) -m tools.environment

environment-dev:
	@$(PYTHON) -m tools.environment --dev

serve: environment ## serve a real model, and OpenAI's API; MODEL= a folder of your own, PORT=, VARIANT=, GATEWAY=0
	@exec $(VENV)/python -m tools.serve $(SERVE)

chat: environment ## talk to the served model; PORT= as for serve
	@exec $(VENV)/tritonstream chat --url $(HOST):$(GRPC_PORT)

test: environment-dev ## every test; ARGS= goes to pytest
	@$(VENV)/python -m pytest $(ARGS)

test-container: environment-dev ## the tests of the containers: as root, with Debian's docker.io and debootstrap
	@$(VENV)/python -m pytest -m container tests/container $(ARGS)

image: ## build both images; BASE_IMAGE=debian:bookworm-slim KIND=cpu for a machine without a GPU
	@export DOCKER_BUILDKIT=1 && docker build --file docker/Dockerfile --tag tritonstream $(BUILD) . && \
		docker build --file docker/gateway.Dockerfile --tag tritonstream-gateway .

lint: environment-dev ## ruff, ruff format, mypy --strict, generated files
	@$(VENV)/python -m tools.lint

format: environment-dev ## let ruff format and fix
	@$(VENV)/ruff check --fix . && $(VENV)/ruff format .

bench: environment-dev ## measure the ways to one engine side by side; ARGS= goes to tools.bench
	@exec $(VENV)/python -m tools.bench $(or $(ARGS),paths)

load: environment-dev ## a load test; SCENARIO=steady, TARGET=host:port or http://…, ARGS= goes to locust
	@exec $(VENV)/python -m loadtests $(SCENARIO) --host $(TARGET) $(or $(ARGS),--headless)

doctor: environment ## check this machine as serve does, and show all that was found
	@$(VENV)/python -m tools.doctor --port $(HTTP_PORT) --model "$(MODEL)" --variant "$(VARIANT)" \
		--gateway-port $(if $(filter 0 no false,$(GATEWAY)),0,$(GATEWAY_PORT))

configs: environment ## write config.pbtxt and configs/*.pbtxt from the table in tools/configs.py
	@$(VENV)/python -m tools.configs

lock: ## resolve requirements/*.in into the locks anew
	@$(PYTHON) -m tools.environment lock

clean: ## remove .venv, caches and build
	rm -rf .venv .venv-quantize .cache build .mypy_cache .pytest_cache .ruff_cache *.egg-info client/*.egg-info
