"""What a client of tinker, of whatever version, sees of a server: python serve_walk.py URL. Prints it as JSON."""
import json
import sys
import warnings

import numpy as np
import tinker
from tinker import types

NAME = "Qwen/Qwen3-8B"
warnings.simplefilter("ignore")


def main(url):
    rng = np.random.default_rng(25)
    service = tinker.ServiceClient(base_url=url, api_key="tml-local")
    training = service.create_lora_training_client(NAME, rank=4, seed=3)
    training = training.result() if hasattr(training, "result") else training
    seen = {"supported": [each.model_name for each in service.get_server_capabilities().supported_models],
            "rank": training.get_info().lora_rank, "norms": []}

    def settled(future):
        return future.result() if hasattr(future, "result") else future

    def batch(lengths):
        data = []
        for length in lengths:
            tokens = rng.integers(3, 300, length + 1)
            data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs={
                "target_tokens": tokens[1:], "weights": rng.uniform(-0.2, 1, length).astype(np.float32)}))
        return data

    def stepped(model):
        found = model.forward_backward(batch((4, 9, 2, 6, 3)), "cross_entropy").result()
        metrics = model.optim_step(types.AdamParams(learning_rate=1e-2)).result().metrics
        seen["norms"].append(metrics["grad_norm"])
        return [output["logprobs"].data for output in found.loss_fn_outputs]
    seen["outputs"] = stepped(training)

    def squares(_, log_probabilities):
        loss = sum((each ** 2).sum() for each in log_probabilities)
        return loss, {"squares": loss.item()}
    seen["custom"] = training.forward_backward_custom(batch((5, 3)), squares).result().metrics["squares"]
    stepped(training)
    path = training.save_state("half").result().path
    stepped(settled(service.create_training_client_from_state_with_optimizer(path)))
    sampler = settled(training.save_weights_and_get_sampling_client())
    prompt = types.ModelInput.from_ints([5, 6, 7])
    reply = sampler.sample(prompt, 2, types.SamplingParams(max_tokens=6, seed=1)).result()
    seen["samples"] = [each.tokens for each in reply.sequences]
    seen["log probabilities"] = sampler.compute_logprobs(prompt).result()
    named = settled(training.save_weights_for_sampler("named")).path
    seen["of a path"] = settled(service.create_sampling_client(model_path=named)).compute_logprobs(prompt).result()
    listed = service.create_rest_client().list_checkpoints(training.model_id).result().checkpoints
    seen["checkpoints"] = sorted(each.checkpoint_id for each in listed)
    try:
        training.forward_backward(batch((3,)), "hinge").result()
    except tinker.RequestFailedError as error:
        seen["refused"] = "hinge" in str(error)
    print(json.dumps({"version": tinker.__version__, "seen": seen}))


if __name__ == "__main__":
    main(sys.argv[1])
