import time


def test_try(server, service_client):
    t = time.time()
    c = service_client.create_lora_training_client("Qwen/Qwen3-8B", rank=4, seed=1)
    print(c.get_info(), time.time() - t)
    r = c.save_state("ck1").result()
    print(r, time.time() - t)
