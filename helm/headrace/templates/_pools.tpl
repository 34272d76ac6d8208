{{/* Pools, and which worker belongs to which scheduler. */}}

{{/* All pools as YAML under `pools`, each with the values of `gpuworker` where it has none of its own. */}}
{{- define "headrace.pools" -}}
{{- $pools := list -}}
{{- range .Values.pools -}}
{{- $pools = append $pools (mustMergeOverwrite (mustDeepCopy $.Values.gpuworker) (mustDeepCopy .)) -}}
{{- end -}}
{{- dict "pools" $pools | toYaml -}}
{{- end }}

{{/* How many workers of a pool have a name: as many as there may be, and one that may come later. */}}
{{- define "headrace.numWorkers" -}}
{{- $most := ternary .maxReplicas .autoscaling.maxReplicas (eq .autoscaling.type "none") | int -}}
{{- max 1 $most (ternary (int .replicas) 0 (has .autoscaling.type (list "none" "controller"))) -}}
{{- end }}

{{/*
Addresses of the workers that a scheduler owns, as YAML under `workers`; takes a dict of root and index.
Worker i of pool p belongs to scheduler (i + p) mod N: a pool that grows moves no worker, and pools of
one worker are spread over the schedulers.
*/}}
{{- define "headrace.workers" -}}
{{- $root := .root -}}
{{- $index := int .index -}}
{{- $num := int .root.Values.scheduler.replicas -}}
{{- $workers := list -}}
{{- range $p, $pool := (include "headrace.pools" .root | fromYaml).pools -}}
{{- $name := include "headrace.poolName" (dict "root" $root "pool" $pool.name) -}}
{{- range $i := until (include "headrace.numWorkers" $pool | int) -}}
{{- if eq (mod (add $i $p) $num | int) $index -}}
{{- $workers = append $workers (printf "%s-%d.%s.%s:8702" $name $i $name (include "headrace.domain" $root)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- dict "workers" $workers | toYaml -}}
{{- end }}

{{/* Addresses of all schedulers, as YAML under `schedulers`. */}}
{{- define "headrace.schedulers" -}}
{{- $name := printf "%s-scheduler" (include "headrace.fullname" .) -}}
{{- $schedulers := list -}}
{{- range $i := until (int .Values.scheduler.replicas) -}}
{{- $schedulers = append $schedulers (printf "%s-%d.%s.%s:8701" $name $i $name (include "headrace.domain" $)) -}}
{{- end -}}
{{- dict "schedulers" $schedulers | toYaml -}}
{{- end }}
