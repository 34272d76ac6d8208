{{/* What the schema cannot say. Each message names the value and says what to do. */}}

{{- define "headrace.checkGrace" -}}
{{- $least := add (int .values.preStopSeconds) (int .values.drainTimeoutSeconds) 5 -}}
{{- if lt (int .values.terminationGracePeriodSeconds) $least -}}
{{- fail (printf "%s.terminationGracePeriodSeconds is %d: Kubernetes would kill the service while it drains; give at least %d (preStopSeconds + drainTimeoutSeconds + 5)" .name (int .values.terminationGracePeriodSeconds) $least) -}}
{{- end -}}
{{- end }}

{{- define "headrace.checkAutoscaling" -}}
{{- with .values.autoscaling -}}
{{- if and (ne .type "none") (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail (printf "%s.autoscaling: minReplicas is greater than maxReplicas" $.name) -}}
{{- end -}}
{{- if and (eq .type "hpa") (lt (int .minReplicas) 1) -}}
{{- fail (printf "%s.autoscaling.minReplicas: type hpa needs at least 1; keda can go down to 0" $.name) -}}
{{- end -}}
{{- if and (eq .type "hpa") (not .metrics) -}}
{{- fail (printf "%s.autoscaling.metrics: type hpa needs at least one metric" $.name) -}}
{{- end -}}
{{- if and (eq .type "keda") (not .triggers) -}}
{{- fail (printf "%s.autoscaling.triggers: type keda needs at least one trigger" $.name) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "headrace.checkPools" -}}
{{- $names := dict -}}
{{- range (include "headrace.pools" . | fromYaml).pools -}}
{{- $name := printf "pools[%s]" .name -}}
{{- if hasKey $names .name -}}
{{- fail (printf "%s: two pools have this name" $name) -}}
{{- end -}}
{{- $_ := set $names .name true -}}
{{- include "headrace.checkGrace" (dict "name" $name "values" .) -}}
{{- include "headrace.checkAutoscaling" (dict "name" $name "values" .) -}}
{{- $resources := default (dict) .resources -}}
{{- if or (hasKey (default (dict) $resources.limits) .gpu.resource) (hasKey (default (dict) $resources.requests) .gpu.resource) -}}
{{- fail (printf "%s.resources: %s is set by gpu.count" $name .gpu.resource) -}}
{{- end -}}
{{- if .leaderWorkerSet.enabled -}}
{{- if ne .autoscaling.type "none" -}}
{{- fail (printf "%s.leaderWorkerSet: groups have replicas, and no autoscaling" $name) -}}
{{- end -}}
{{- if eq $.Values.modelCache.type "claimPerWorker" -}}
{{- fail (printf "%s.leaderWorkerSet: groups have no claims of their own; take another modelCache.type" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $index := ternary (until (int .Values.scheduler.replicas)) (list) (eq .Values.discovery.type "static") -}}
{{- if not (include "headrace.workers" (dict "root" $ "index" $index) | fromYaml).workers -}}
{{- fail (printf "scheduler.replicas is %d: scheduler %d would own no worker; give fewer schedulers or more workers (worker i of pool p belongs to scheduler (i + p) mod replicas)" (int $.Values.scheduler.replicas) $index) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "headrace.checkTls" -}}
{{- with .Values.tls -}}
{{- if .enabled -}}
{{- if not .certManager.enabled -}}
{{- range $service := list "router" "scheduler" "gpuworker" "store" -}}
{{- if and (not (get $.Values.tls.existingSecrets $service)) (or (ne $service "store") (eq $.Values.store.type "valkey")) -}}
{{- fail (printf "tls.existingSecrets.%s: with tls.enabled give a Secret with tls.crt, tls.key and ca.crt, or set tls.certManager.enabled" $service) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if eq $.Values.probes.type "grpc" -}}
{{- fail "probes.type: the kubelet's gRPC probes do not speak TLS; take auto or exec" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "headrace.checkStore" -}}
{{- with .Values.store -}}
{{- if and (eq .type "external") (eq (empty .external.url) (empty .external.existingSecret)) -}}
{{- fail "store.external: give either url or existingSecret" -}}
{{- end -}}
{{- if and (eq .type "valkey") .valkey.existingSecret .valkey.password -}}
{{- fail "store.valkey: give either password or existingSecret" -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "headrace.checkCaches" -}}
{{- range $name := list "modelCache" "kernelCache" -}}
{{- $cache := get $.Values $name -}}
{{- if and (eq $cache.type "existingClaim") (not $cache.existingClaim) -}}
{{- fail (printf "%s.existingClaim: name the claim" $name) -}}
{{- end -}}
{{- if and (eq $cache.type "hostPath") (not $cache.hostPath) -}}
{{- fail (printf "%s.hostPath: name the folder" $name) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* A Secret of the user that lacks a key keeps pods from starting; takes a dict of root, name, secret, keys. */}}
{{- define "headrace.checkSecret" -}}
{{- if .secret -}}
{{- with lookup "v1" "Secret" .root.Release.Namespace .secret -}}
{{- $data := default (dict) .data -}}
{{- range $.keys -}}
{{- if not (hasKey $data .) -}}
{{- fail (printf "%s: the Secret %s has no key %s; it needs %s" $.name $.secret . (join ", " $.keys)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "headrace.checkSecrets" -}}
{{- $tokens := list "router-token" "scheduler-token" "gpuworker-token" -}}
{{- if .Values.monitoring.enabled -}}
{{- $tokens = append $tokens "metrics-token" -}}
{{- end -}}
{{- include "headrace.checkSecret" (dict "root" . "name" "auth.existingSecret" "secret" .Values.auth.existingSecret "keys" $tokens) -}}
{{- include "headrace.checkSecret" (dict "root" . "name" "auth.apiKeys.existingSecret" "secret" .Values.auth.apiKeys.existingSecret "keys" (list .Values.auth.apiKeys.key)) -}}
{{- include "headrace.checkSecret" (dict "root" . "name" "hfToken.existingSecret" "secret" .Values.hfToken.existingSecret "keys" (list .Values.hfToken.key)) -}}
{{- if eq .Values.store.type "external" -}}
{{- include "headrace.checkSecret" (dict "root" . "name" "store.external.existingSecret" "secret" .Values.store.external.existingSecret "keys" (list .Values.store.external.key)) -}}
{{- else if eq .Values.store.type "valkey" -}}
{{- include "headrace.checkSecret" (dict "root" . "name" "store.valkey.existingSecret" "secret" .Values.store.valkey.existingSecret "keys" (list "valkey.conf" "url")) -}}
{{- end -}}
{{- if and .Values.tls.enabled (not .Values.tls.certManager.enabled) -}}
{{- range $service, $secret := .Values.tls.existingSecrets -}}
{{- include "headrace.checkSecret" (dict "root" $ "name" (printf "tls.existingSecrets.%s" $service) "secret" $secret "keys" (list "tls.crt" "tls.key" "ca.crt")) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "headrace.checks" -}}
{{- if not (regexMatch "^[a-z]" (include "headrace.fullname" .)) -}}
{{- fail (printf "the release is called %s: names of Services begin with a letter; set fullnameOverride" .Release.Name) -}}
{{- end -}}
{{- include "headrace.checkGrace" (dict "name" "router" "values" .Values.router) -}}
{{- include "headrace.checkGrace" (dict "name" "scheduler" "values" .Values.scheduler) -}}
{{- include "headrace.checkAutoscaling" (dict "name" "router" "values" .Values.router) -}}
{{- include "headrace.checkPools" . -}}
{{- include "headrace.checkTls" . -}}
{{- include "headrace.checkStore" . -}}
{{- include "headrace.checkCaches" . -}}
{{- include "headrace.checkSecrets" . -}}
{{- if and .Values.hfToken.value .Values.hfToken.existingSecret -}}
{{- fail "hfToken: give either value or existingSecret" -}}
{{- end -}}
{{- if and .Values.poolController.roles (not .Values.poolController.tpotSeconds) -}}
{{- fail "poolController.roles: needs tpotSeconds; nothing else says how decode workers do" -}}
{{- end -}}
{{- if not .Values.monitoring.enabled -}}
{{- if eq .Values.probes.type "http" -}}
{{- fail "probes.type: http needs monitoring.enabled, which opens the port" -}}
{{- end -}}
{{- if .Values.monitoring.podMonitors.enabled -}}
{{- fail "monitoring.podMonitors: needs monitoring.enabled, which opens the port" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.auth.apiKeys.existingSecret (not .Values.auth.enabled) -}}
{{- fail "auth.apiKeys: needs auth.enabled" -}}
{{- end -}}
{{- if and .Values.auth.existingSecret (or .Values.auth.tokens.router .Values.auth.tokens.scheduler .Values.auth.tokens.gpuworker .Values.auth.tokens.metrics) -}}
{{- fail "auth: give either tokens or existingSecret" -}}
{{- end -}}
{{- end }}
